"""Accuracy over tokens and data efficiency on curves drawn by hand."""

from __future__ import annotations

import json

import pytest

from dreamer_jax.config.sections import Config, DataConfig, TrainingConfig
from dreamer_jax.evaluation.comparison import accuracies, average, data_efficiency, draw, tokens_to_reach

BASELINE = [(10.0, 0.1), (20.0, 0.3), (30.0, 0.4), (40.0, 0.35)]
CONFIG = Config(training=TrainingConfig(batch_size=2), data=DataConfig(sequence_length=5))


def test_data_efficiency():
    assert data_efficiency(BASELINE, BASELINE) == 1.0  # its best is at 30, not at the end
    assert data_efficiency([(10.0, 0.2), (20.0, 0.6)], BASELINE) == pytest.approx(30 / 15)  # 0.4 is halfway
    assert data_efficiency([(5.0, 0.5), (20.0, 0.6)], BASELINE) == pytest.approx(30 / 5)
    assert data_efficiency([(10.0, 0.1), (60.0, 0.4)], BASELINE) == pytest.approx(0.5)
    assert data_efficiency([(10.0, 0.1), (20.0, 0.39)], BASELINE) is None
    assert data_efficiency([], BASELINE) is None and data_efficiency(BASELINE, []) is None
    never = [(10.0, 0.0), (20.0, 0.0)]  # every curve has reached that when it was first measured
    assert data_efficiency(BASELINE, never) is None and data_efficiency(never, never) is None


def test_a_curve_that_falls_again_has_reached_the_level():
    assert tokens_to_reach([(1.0, 0.0), (2.0, 0.5), (3.0, 0.1), (4.0, 0.9)], 0.4) == pytest.approx(1.8)


def test_the_average_is_a_curve_of_its_own():
    # Each best alone is 0.8 and 0.6; together they are never better than 0.5.
    assert average([[(1, 0.8), (2, 0.2), (3, 0.9)], [(1, 0.2), (2, 0.6)]]) == [(1, 0.5), (2, pytest.approx(0.4))]


def write_results(directory, name, step, **accuracy):
    folder = directory / "evaluation" / name
    folder.mkdir(parents=True)
    tasks = {
        label: {
            "task": label.partition("-")[0],
            "questions": 9,
            "metrics": {metric: {"value": value, "standard_error": None}},
        }
        for label, (metric, value) in accuracy.items()
    }
    (folder / "results.json").write_text(json.dumps({"source": {"step": step}, "tasks": tasks}))


def test_curves_come_from_training_and_from_eval(tmp_path):
    metrics = [
        {"step": 1, "loss": 2.0, "heldout/exact_match": 0.0},
        {"step": 1, "eval/gsm8k/strict": 0.1, "eval/gsm8k/flexible": 0.9, "eval/ppl/token_perplexity": 7.0},
        {"step": 3, "eval/gsm8k/strict": 0.3, "eval/mathqa/acc": 0.25, "eval/mathqa/acc_norm": 0.9},
    ]
    write_results(tmp_path, "step-3", 3, gsm8k=("strict", 0.5), mathqa=("acc", 0.3), ppl=("token_perplexity", 9.0))
    write_results(tmp_path, "step-3-depth-9", 3, gsm8k=("strict", 0.99))
    found = accuracies(tmp_path, CONFIG, metrics)
    assert found == {
        "gsm8k": [(10, 0.1), (30, 0.5)],  # the whole benchmark in place of what training had time for
        "mathqa": [(30, 0.3)],
        "average": [(30, pytest.approx(0.4))],
    }


def test_exact_match_of_a_task_is_a_curve_too(tmp_path):
    metrics = [{"step": 1, "heldout/exact_match": 0.0}, {"step": 2, "heldout/exact_match": 0.5}]
    assert accuracies(tmp_path, CONFIG, metrics) == {"held-out": [(10, 0.0), (20, 0.5)]}


def test_figure(tmp_path):
    curves = {"LA": BASELINE, "DR": [(10.0, 0.2), (20.0, 0.6)], "none": []}
    path = tmp_path / "figure.png"
    assert draw({"held-out loss": {"LA": [(1.0, 2.0)]}, "gsm8k": curves, "empty": {"LA": []}}, "LA", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not draw({"gsm8k": {"LA": []}}, "LA", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
