"""`dreamer info`, and the extras as setup.cfg declares them."""

import configparser
import platform
from pathlib import Path

import pytest

from dreamer_jax.cli import extras
from dreamer_jax.cli.main import main
from dreamer_jax.config.models import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def fake_metadata(monkeypatch: pytest.MonkeyPatch, requires: dict[str, list[str]]) -> None:
    def lookup(name: str) -> list[str]:
        if name not in requires:
            raise extras.metadata.PackageNotFoundError(name)
        return requires[name]

    monkeypatch.setattr(extras.metadata, "requires", lookup)


def test_info_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    import jax

    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert f"Python {platform.python_version()}" in output
    assert f"devices: {jax.device_count()} on platform {jax.devices()[0].platform}" in output


def test_info_says_how_to_install_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fake_metadata(monkeypatch, {"dreamer-jax": ["PyYAML>=6", 'no-such-thing>=1; extra == "eval"']})
    assert main(["info"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in lines if line.startswith("eval")]
    assert "no-such-thing" in row and "pip install -e '.[eval]'" in row
    (base,) = [line for line in lines if line.startswith("base: ")]
    assert "PyYAML 6" in base and "missing" not in base


def test_info_lists_the_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv(VARIABLE, "")

    def rows() -> dict[str, str]:
        lines = capsys.readouterr().out.splitlines()
        return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.strip()}

    assert main(["info"]) == 0
    found = rows()
    assert found["dreamer"] == "Depth-recurrent attention mixtures and their layered baseline. built in"
    assert "toy" not in found
    toy = ROOT / "tests" / "config" / "toy_family.py"
    assert main(["info", "--family-module", str(toy)]) == 0
    assert rows()["toy"] == f"Toys, which go round and round. --family-module {toy}"
    clash = tmp_path / "clash.py"
    clash.write_text(toy.read_text().replace('"toy"', '"dreamer"'))
    assert main(["info", f"--family-module={clash}"]) == 0
    assert rows()["dreamer"].startswith("model.family: family 'dreamer' is there twice: built in and --family-module")


def test_an_extra_of_a_dependency_counts_by_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_metadata(
        monkeypatch,
        {
            "dreamer-jax": ["jax>=0.10", 'jax[tpu]>=0.10; extra == "tpu"', "torch; extra == 'export'"],
            "jax": ["jaxlib>=0.10", 'libtpu==0.0.5; extra == "tpu"', 'requests; extra == "tpu"', 'x; extra == "cuda"'],
        },
    )
    assert extras.requirements() == {"": ["jax"], "tpu": ["jax", "libtpu", "requests"], "export": ["torch"]}
    assert extras.extra_of("libtpu") == "tpu" and extras.extra_of("jax") == "" and extras.extra_of("numpyro") is None


def test_the_extras_a_person_is_promised() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    assert {"tpu", "cuda", "data", "eval", "export", "bench", "docs", "gcs", "serve", "test"} == set(
        declared["options.extras_require"]
    )


def test_the_lock_holds_every_dependency_of_the_tests() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    wanted = declared["options"]["install_requires"] + declared["options.extras_require"]["test"]
    lines = (ROOT / "requirements" / "test.lock").read_text().splitlines()
    locked = {extras._normal(line.partition("==")[0]) for line in lines if "==" in line}
    names = {extras._normal(line.partition(">=")[0].partition("[")[0]) for line in wanted.split()}
    assert names <= locked
