"""The notebooks: without output in git, and every cell runs, in a small size, in a plain Python process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "launch/colab").glob("*.ipynb"))
SMALL = (
    "--model.depth 2 --model.hidden_size 32 --model.num_experts 4 --model.experts_per_token 2 --model.expert_size 16 "
    "--training.batch_size 4 --data.heldout_records 4 --data.difficulty 2 --evaluation.harder 3 --training.log_every 1"
)
RUNNER = """
import json, sys, types
shown = []
display = types.ModuleType("IPython.display")
display.display = lambda thing: shown.append(thing)
display.clear_output = lambda wait=False: None
display.Image = lambda filename: open(filename, "rb").read(8)
ipython = types.ModuleType("IPython")
ipython.get_ipython, ipython.version_info = lambda: None, (9, 0)  # which matplotlib asks for
sys.modules |= {"IPython": ipython, "IPython.display": display}
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
print("images shown:", sum(thing == b"\\x89PNG\\r\\n\\x1a\\n" for thing in shown))
"""
"""Stands for Jupyter: cells one after the other in one namespace; only IPython's display is missing in the tests."""


def execute(name: str, **environment: str) -> str:
    """What the cells print, standard error included."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(ROOT / "launch/colab" / f"{name}.ipynb")],
        cwd=ROOT,
        env=os.environ | {"MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "PYTHON": sys.executable} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_notebook_has_a_test():
    assert [path.stem for path in NOTEBOOKS] == ["depth", "pod_planning", "quickstart", "zoo"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_well_formed_and_without_output(path):
    """The parts of nbformat 4.5 that these notebooks use; cells as git should have them."""
    text = path.read_text()
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    identifiers = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identifiers)) == len(identifiers)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", cell["id"]) and cell["metadata"] == {}
        lines = cell["source"]
        assert lines and all(line.endswith("\n") for line in lines[:-1]) and not lines[-1].endswith("\n")
        if cell["cell_type"] == "code":
            assert set(cell) == {"cell_type", "execution_count", "id", "metadata", "outputs", "source"}
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert not any(line.startswith(("!", "%")) for line in lines), "plain Python, so that it runs anywhere"
        else:
            assert set(cell) == {"cell_type", "id", "metadata", "source"} and cell["cell_type"] == "markdown"


@pytest.mark.slow
def test_pod_planning():
    printed = execute("pod_planning", DREAMER_NOTEBOOK_COMPILE="0", DREAMER_NOTEBOOK_CONFIG="dr_da_32")
    for name in ("v5litepod-256", "v4-128", "v5p-512"):
        assert re.search(rf"^{name} +\d+ +[\d.]+ +[\d.]+% +[\d,]+ ", printed, re.MULTILINE), printed
    assert "queued-resources create paper" in printed and "--accelerator-type=v5p-128" in printed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs that two notebooks share, as they do in Colab: the second finds the first one's model."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow  # trains what `dreamer train quickstart` does, in a process of its own
def test_quickstart_with_one_small_variant(runs):
    printed = execute(
        "quickstart",
        DREAMER_NOTEBOOK_RUNS=str(runs),
        DREAMER_NOTEBOOK_STEPS="4",
        DREAMER_NOTEBOOK_OPTIONS=SMALL,
        DREAMER_NOTEBOOK_VARIANTS="DR+DA",
        DREAMER_NOTEBOOK_EXPORT="0",  # in full below
    )
    assert f"done: {runs / 'dr_da'}" in printed and "DR+DA, depth 2" in printed
    assert '"step": 4' in (runs / "dr_da/metrics.jsonl").read_text()


@pytest.mark.slow  # needs the run of the one above
def test_depth(runs):
    """On the model of the quick start, or on one that it trains itself."""
    words = "--training.steps 4 --checkpoint.every 4 " + SMALL
    printed = execute(
        "depth", DREAMER_NOTEBOOK_RUNS=str(runs), DREAMER_NOTEBOOK_OPTIONS=words, DREAMER_NOTEBOOK_SEQUENCES="4"
    )
    assert "images shown: 2" in printed and "((T&F)|T)= " in printed
    assert set(json.loads((runs / "dr_da/depth.json").read_text())["depths"]) == {"1", "2", "4"}
    assert (runs / "dr_da/analysis/report.html").is_file()


@pytest.mark.slow  # compiles four families, each in a process of its own
def test_zoo(tmp_path):
    printed = execute("zoo", DREAMER_NOTEBOOK_RUNS=str(tmp_path), DREAMER_NOTEBOOK_TOKENS="4000")
    assert "images shown: 1" in printed and "data efficiency over la" in printed
    assert set(json.loads((tmp_path / "zoo/runs/study.json").read_text())["tasks"]) == {"boolean"}


@pytest.mark.slow
def test_quickstart_in_full(tmp_path):
    small = SMALL.replace("--training.log_every 1", "--training.log_every 10")
    small = small.replace("--model.num_experts 4 ", "")  # the notebook gives LA its own
    printed = execute(
        "quickstart",
        DREAMER_NOTEBOOK_RUNS=str(tmp_path),
        DREAMER_NOTEBOOK_STEPS="60",
        DREAMER_NOTEBOOK_OPTIONS=small,
    )
    for name in ("la", "dr", "dr_da"):
        assert (tmp_path / name / "summary.json").is_file() and f"{name}" in printed
    try:
        import torch  # noqa: F401
    except ImportError:
        assert "torch is not installed" in printed
    else:
        assert (tmp_path / "export/model.safetensors").is_file()
