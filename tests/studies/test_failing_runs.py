"""What a study makes of runs that fail: the others are made, and of those tried the diverged one is the worst."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dreamer_jax.errors import DIVERGED, UserError
from dreamer_jax.studies import study as study_module
from dreamer_jax.studies.jobs import RunsFailed
from dreamer_jax.studies.study import conduct
from dreamer_jax.studies.study_file import StudyFile, read_study

STUDY = """
baseline: large
seeds: 2
match: none
tasks:
  easy: {tokens: 1000, data: {difficulty: 1, sequence_length: 32, heldout_records: 8}}
training: {batch_size: 16, warmup_steps: 2}
model: {family: ouro, layers: 1, heads: 2, kv_heads: 2, head_size: 8, vocab_size: 259, depth: 2}
members:
  large: {model: {hidden_size: 32}}
  small: {model: {hidden_size: 16}}
"""
SWEEP = "sweep: {key: training.learning_rate, values: [1e-3, 2e-3], share: 0.5}"


def study(folder: Path, *more: str) -> StudyFile:
    path = folder / "small.yaml"
    path.write_text("\n".join([STUDY, *more]))
    return read_study(path)


@pytest.fixture
def fail(monkeypatch) -> Callable[..., list[str]]:
    """In place of `run_jobs`: some runs fail, the rest do nothing. Gives the names of all that was asked for."""

    def these(**failures: str) -> list[str]:
        asked: list[str] = []

        def run_jobs(jobs, *_) -> int:
            names = [job.name.removeprefix("easy/") for job in jobs]
            asked.extend(names)
            failed = {f"easy/{name}": failures[name] for name in names if name in failures}
            if failed:
                raise RunsFailed(failed)
            return 0

        monkeypatch.setattr(study_module, "run_jobs", run_jobs)
        return asked

    return these


def test_a_value_that_diverges_is_the_worst_of_a_sweep(tmp_path, monkeypatch, fail):
    """Though its last finite loss may be the lowest of all."""
    monkeypatch.setattr(study_module, "_last_loss", lambda run: 5 - 1000 * float(run.name[6:]))
    fail(**{"small/sweep-2e-3": DIVERGED})
    result, _ = conduct(study(tmp_path, SWEEP), [], tmp_path, 1, lambda _: None)
    large, small = result["tasks"]["easy"]["members"].values()
    assert small["chosen"] == {"training.learning_rate": "1e-3"} and small["swept"] == {"1e-3": 4.0}
    assert large["chosen"] == {"training.learning_rate": "2e-3"} and large["swept"] == {"1e-3": 4.0, "2e-3": 3.0}


def test_a_sweep_in_which_all_diverge_has_no_best(tmp_path, monkeypatch, fail):
    monkeypatch.setattr(study_module, "_last_loss", lambda run: 1.0)
    fail(**{"small/sweep-1e-3": DIVERGED, "small/sweep-2e-3": DIVERGED})
    with pytest.raises(
        UserError, match=r"easy/small diverged at every training.learning_rate of the sweep, 1e-3, 2e-3"
    ):
        conduct(study(tmp_path, SWEEP), [], tmp_path, 1, lambda _: None)


def test_a_full_disk_says_nothing_of_a_value(tmp_path, fail):
    fail(**{"small/sweep-1e-3": "the disk is full", "small/sweep-2e-3": DIVERGED})
    with pytest.raises(UserError, match="the disk is full"):
        conduct(study(tmp_path, SWEEP), [], tmp_path, 1, lambda _: None)


def test_a_seed_that_diverges_is_the_worst_of_those_begun(tmp_path, monkeypatch, fail):
    monkeypatch.setattr(study_module, "_last_loss", lambda run: float(run.name[3:]))
    asked = fail(**{"small/try0": DIVERGED})
    conduct(study(tmp_path, "tries: 2"), [], tmp_path, 1, lambda _: None)
    assert asked[-4:] == ["large/seed0", "small/seed1", "large/seed2", "small/seed2"]


def test_what_is_complete_beside_a_run_that_failed_is_written(tmp_path, fail):
    fail(**{"small/seed1": "small/seed1 failed"})
    with pytest.raises(UserError, match="small/seed1 failed; the other runs are complete"):
        conduct(study(tmp_path), [], tmp_path, 1, lambda _: None)
    assert json.loads((tmp_path / "study.json").read_text())["tasks"]["easy"]["members"].keys() == {"large", "small"}
