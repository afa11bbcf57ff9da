"""Benchmarks in the middle of training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.runs.metrics import read_metrics
from tests.evaluation.cases import write_benchmarks

RUN = {
    "model.variant": "LA",
    "model.depth": "1",
    "model.hidden_size": "32",
    "model.vocab_size": "259",
    "model.num_experts": "4",
    "model.experts_per_token": "2",
    "model.expert_size": "16",
    "model.dtype": "float32",
    "data.difficulty": "1",
    "data.sequence_length": "48",
    "data.heldout_records": "0",
    "training.steps": "4",
    "training.batch_size": "2",
    "evaluation.tasks": "mathqa",
    "evaluation.tasks_every": "2",
    "evaluation.limit": "3",
}


def train(directory: Path, data: Path, **changes: str) -> int:
    """The exit code of a short training."""
    (directory.parent / "empty.yaml").write_text("{}\n")
    options = {**RUN, "run.dir": str(directory), "evaluation.data": str(data), **changes}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return main(["train", str(directory.parent / "empty.yaml"), *words])


def test_benchmarks_during_training(tmp_path, capsys):
    directory, data = tmp_path / "run", write_benchmarks(tmp_path / "data")
    assert train(directory, data) == 0
    assert "mathqa: 3/3 100%" in capsys.readouterr().out
    found = {record["step"]: record for record in read_metrics(directory) if "eval/mathqa/acc" in record}
    assert sorted(found) == [2, 4]
    assert set(found[2]) == {"step", "eval/mathqa/acc", "eval/mathqa/acc_norm"}

    # `dreamer eval` gets the same from the checkpoint, and extends it to all questions.
    results = directory / "evaluation" / "step-4"
    during = (results / "mathqa.jsonl").read_text().splitlines()
    assert len(during) == 1 + 3
    assert main(["eval", str(directory), "--tasks", "mathqa", "--data", str(data)]) == 0
    assert "3 of 5 are already there" in capsys.readouterr().out
    whole = (results / "mathqa.jsonl").read_text().splitlines()
    assert whole[:4] == during and len(whole) == 1 + 5
    assert main(["eval", str(directory), "--tasks", "mathqa", "--data", str(data), "--fresh"]) == 0
    again = {json.loads(line)["index"]: json.loads(line) for line in whole[1:]}
    for line in (results / "mathqa.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        assert record["logprobs"] == pytest.approx(again[record["index"]]["logprobs"], abs=1e-4)


@pytest.mark.slow
def test_records_of_weights_that_a_run_went_back_from(tmp_path, capsys):
    """It comes to the same step again with other ones; where it repeats what it did, records are used again."""
    directory, data = tmp_path / "run", write_benchmarks(tmp_path / "data")
    assert train(directory, data, **{"checkpoint.every": "2"}) == 0
    first = (directory / "evaluation" / "step-4" / "mathqa.jsonl").read_text()
    shutil.rmtree(directory / "checkpoints" / "4")
    assert train(directory, data, **{"checkpoint.every": "2"}) == 0
    assert "3 of 3 are already there" in capsys.readouterr().out
    assert (directory / "evaluation" / "step-4" / "mathqa.jsonl").read_text() == first

    shutil.rmtree(directory / "checkpoints" / "4")
    changed = {"checkpoint.every": "2", "training.learning_rate": "1.0", "checkpoint.allow": "learning_rate"}
    assert train(directory, data, **changed) == 0
    assert "mathqa: 3/3 100%" in capsys.readouterr().out
    records = directory / "evaluation" / "step-4" / "mathqa.jsonl"
    assert records.read_text() != first
    words = ["eval", str(directory / "checkpoints" / "4"), "--data", str(data), "--tasks", "mathqa", "--limit", "3"]
    assert main(words) == 0 and "3 of 3 are already there" in capsys.readouterr().out
    records.write_text(first)
    assert main(words) == 2 and "of another evaluation (another checkpoint)" in capsys.readouterr().err


def test_missing_files_stop_before_training(tmp_path, capsys):
    assert train(tmp_path / "run", tmp_path / "nowhere") == 2
    assert "nowhere/mathqa/test.jsonl does not exist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
