"""The wheel stands alone: built, installed without the checkout, and used from an empty folder.

Beside it the environment of the tests lends its packages (jax and so on), so that nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from dreamer_jax import __version__
from dreamer_jax.configs import FOLDER, files

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("dreamer_jax", "pallas_kernels", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
MOST_BYTES = 2_000_000
SMALL = [
    *("--model.depth", "2", "--model.hidden_size", "16", "--model.num_experts", "4", "--model.experts_per_token", "2"),
    *("--model.expert_size", "8", "--training.steps", "3", "--training.batch_size", "2", "--data.heldout_records", "4"),
    *("--data.sequence_length", "64", "--data.difficulty", "2", "--evaluation.harder", "3"),
]


def test_the_version_is_the_same_wherever_it_stands():
    changes = re.search(r"^## (\S+)(?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = (ROOT / "CITATION.cff").read_text()
    assert changes and re.search(rf"^version: {re.escape(__version__)}$", cited, re.MULTILINE)
    if changes[1] != "Unreleased":
        assert changes[1] == __version__ and f"date-released: {changes[2]}\n" in cited


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built of a copy of the sources: in the checkout, setuptools would leave a folder build, or use an old one."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    words = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def dreamer(wheel: Path, tmp_path_factory):
    """Calls the installed `dreamer` in an empty folder; returns what it printed and said on stderr."""
    venv, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    words = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }  # which may name the checkout
    subprocess.run([*pip, *words], check=True, env=environment)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and the .pth files there, such as that of the checkout, aren't read.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def call(*words: str, code: int = 0) -> str:
        command = [str(venv / "bin" / "dreamer"), *words]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    call.folder, call.packages = empty, packages
    return call


@pytest.mark.slow  # builds and installs a wheel; 76 CPU seconds with the next test, most of them compiling
def test_the_wheel_has_what_commands_need_and_nothing_else(wheel):
    assert wheel.name == f"dreamer_jax-{__version__}-py3-none-any.whl" and wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"dreamer_jax/{path.relative_to(FOLDER.parent)}" for path in files()} <= names
    rest = {name for name in names if not name.endswith((".py", ".yaml", "py.typed", "serving/page.html"))}
    assert all(name.startswith(f"dreamer_jax-{__version__}.dist-info/") for name in rest)
    assert {name.partition("/")[0] for name in names - rest} == {"dreamer_jax", "pallas_kernels"}
    assert not any("test" in name.split("/")[-1].split("_")[0] for name in names)


def test_the_source_distribution_has_no_tests_and_no_samples(tmp_path):
    """It is built where they lie: MANIFEST.in keeps them out, with all data that is there under other licences."""
    for name in (*SOURCES, "CHANGELOG.md", "CITATION.cff", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    (built,) = tmp_path.glob("*.tar.gz")
    assert built.stat().st_size < MOST_BYTES
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "LICENSE", "CHANGELOG.md", "dreamer_jax/configs/quickstart.yaml"} <= names
    assert not any(name.startswith("tests") or name.endswith((".npz", ".jsonl", ".csv")) for name in names)


@pytest.mark.slow  # as above
def test_commands_work_in_an_empty_folder(dreamer):
    assert __version__ in dreamer("--version")
    assert "  la_16 " in dreamer("config", "list")
    assert str(dreamer.packages / "dreamer_jax/configs/quickstart.yaml:") in dreamer("config", "show", "quickstart")
    assert "num_experts 517, expert_size 504" in dreamer("match", "dr_16", "--to", "la_16", "--write", "mine/dr.yaml")
    assert "\nbase:" not in (dreamer.folder / "mine/dr.yaml").read_text()
    assert dreamer("budget", "mine/dr.yaml").splitlines()[1:] == dreamer("budget", "dr_16").splitlines()[1:]
    assert "did you mean 'la_16'?" in dreamer("budget", "la_15", code=2)
    assert "data/llama3/tokenizer.model does not exist" in dreamer(
        "data", "prepare", "gsm8k_math", "--out", "x", code=2
    )
    assert "the package has no study of this name; did you mean 'zoo'?" in dreamer("study", "zo", code=2)
    assert dreamer("data", "show", "graph_laptop", "--documents", "1")
    assert "step 3/3" in dreamer("train", "quickstart", *SMALL)
    assert dreamer("generate", "runs/quickstart", "--prompt", "not True =", "--max-tokens", "4")
    dreamer("analyze", "runs/quickstart", "--sequences", "4")
    assert (dreamer.folder / "runs/quickstart/analysis/report.html").is_file()
    if find_spec("torch") and find_spec("transformers"):
        dreamer("export", "runs/quickstart", "exported")
        assert (dreamer.folder / "exported/model.safetensors").is_file()
    else:
        assert "pip install 'dreamer-jax[export]'" in dreamer("export", "runs/quickstart", "exported", code=2)
