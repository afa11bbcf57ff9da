"""Every study of the package with `--quick`, from its command to its tables: minutes each, so not run by default."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dreamer_jax.configs import names
from dreamer_jax.studies.study_file import read_study
from tests.data.preparing import problems, write_lines, write_mixture

pytestmark = pytest.mark.slow

MINUTES = 30
"""What a quick study may take on two idle cores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where studies are made: with text and a tokenizer under the names that their files give."""
    found = tmp_path_factory.mktemp("studies")
    write_lines(found / "problems.jsonl", problems(3000))
    mixture = write_mixture(found / "text.yaml", "sources: {problems: {path: problems.jsonl}}")
    tokenizer = "data/gsm8k_math_bpe.json"
    run(found, "data", "train-tokenizer", str(mixture), "--size", "1024", "--out", tokenizer)
    mixture.write_text(f"tokenizer: {tokenizer}\n{mixture.read_text()}")
    run(found, "data", "prepare", str(mixture), "--out", "data/gsm8k_math_bpe")
    return found


def run(folder: Path, *words: str, minutes: float = MINUTES) -> None:
    """A command of `dreamer` in a folder; fails with its output."""
    command = [sys.executable, "-m", "dreamer_jax", *words]
    done = subprocess.run(
        command, cwd=folder, timeout=60 * minutes, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", names(["study"]))
def test_a_quick_study_is_complete_within_half_an_hour(folder: Path, name: str) -> None:
    run(folder, "study", name, "--quick", "--jobs", "2", "--out", name)
    found, study = json.loads((folder / name / "study.json").read_text()), read_study(name)
    assert list(found["tasks"]) == [task.name for task in study.tasks]
    for task in study.tasks:
        members = found["tasks"][task.name]["members"]
        assert list(members) == [member.name for member in study.members]
        for member in members.values():
            (seed,) = member["seeds"].values()
            assert seed["curves"] and seed["by_depth"]
        assert f"**{task.name}**" in (folder / name / "study.md").read_text()
        assert (folder / name / f"study_{task.name}.png").stat().st_size > 0
