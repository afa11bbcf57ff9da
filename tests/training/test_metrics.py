"""Measurements by hand, and the files they are written to."""

import dataclasses
import json
import math
import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from dreamer_jax.blocks.usage import bias_range, expert_use, gini
from dreamer_jax.chips import Chip
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig, MeshConfig
from dreamer_jax.families import build
from dreamer_jax.runs.metrics import MetricsWriter, read_metrics
from dreamer_jax.training import figures
from dreamer_jax.training.metrics import model_flop_utilisation


def test_gini():
    assert gini(np.array([3, 3, 3, 3])) == 0
    assert gini(np.array([0, 0, 8, 0])) == pytest.approx(3 / 4)
    assert gini(np.array([0, 0, 0])) == 0
    # Mean absolute difference over all ordered pairs, over twice the mean: (2*1 + 2*3 + 2*4) / 9 / (2 * 8/3).
    assert gini(np.array([5, 1, 2])) == pytest.approx((2 * 4 + 2 * 3 + 2 * 1) / 9 / (2 * 8 / 3))


COUNTS = np.array([[4, 0, 2, 2], [0, 0, 6, 2]])


def test_expert_use_sums_the_depths_of_dr():
    use = expert_use({"expert_attention": COUNTS}, recurrent=True)  # 4 0 8 4
    assert use["experts/expert_attention/used"] == 3 / 4
    assert use["experts/expert_attention/max_over_median"] == 8 / 4
    assert use["experts/expert_attention/gini"] == pytest.approx(gini(np.array([4, 0, 8, 4])))


def test_expert_use_averages_the_layers_of_la():
    use = expert_use({"expert_attention": COUNTS}, recurrent=False)
    assert use["experts/expert_attention/used"] == (3 / 4 + 2 / 4) / 2
    assert use["experts/expert_attention/max_over_median"] == (4 / 2 + 6 / 1) / 2
    expected = (gini(np.array([4, 0, 2, 2])) + gini(np.array([0, 0, 6, 2]))) / 2
    assert use["experts/expert_attention/gini"] == pytest.approx(expected)


def test_expert_use_with_most_experts_idle_is_finite():
    use = expert_use({"depth_attention": np.array([[0, 0, 9]])}, recurrent=True)
    assert use["experts/depth_attention/max_over_median"] == 0
    assert all(math.isfinite(value) for value in use.values())


def test_bias_range():
    assert bias_range({"a": np.array([[0.5, -1.0], [2.0, 0.0]])}) == {"bias/a/min": -1.0, "bias/a/max": 2.0}


@pytest.mark.parametrize("variant", ["LA", "DR"])
def test_what_a_model_logs(variant):
    """Both, of its own state and of the counts of a step: summed over the depths of DR, averaged over LA's layers."""
    family = build(DreamerConfig(variant=variant))
    bias = {"expert_attention": np.array([0.5, -1.0])}
    logged = family.log({"balancing": bias}, {"expert_attention": COUNTS})
    assert logged == expert_use({"expert_attention": COUNTS}, recurrent=variant == "DR") | bias_range(bias)


def test_utilisation_by_hand():
    """LA of two layers, every product by hand: forward and twice backward, average context (S + 1) / 2."""
    model = DreamerConfig(
        variant="LA",
        depth=2,
        hidden_size=8,
        vocab_size=10,
        sa_heads=2,
        sa_kv_heads=1,
        sa_head_size=4,
        num_experts=5,
        experts_per_token=2,
        expert_size=6,
        router_size=4,
    )
    projections = 2 * 8 * (2 + 2) * 4 + 2 * 8 * 8
    attention = 2 * 2 * 2 * 4 * (7 + 1) / 2  # scores and values, two heads of four
    experts = 2 * (3 * 2 * 8 * 6)
    router = 2 * 8 * 4 + 2 * 4 * 5
    forward = 2 * (projections + attention + experts + router) + 2 * 8 * 10
    config = Config(model=model, data=DataConfig(sequence_length=7), mesh=MeshConfig(data=(4,)))
    chip = Chip("chip", peak_flops=1e6, bandwidth=1.0, memory=1.0)
    assert model_flop_utilisation(config, 50.0, chip) == pytest.approx(3 * forward * 50 / 4e6)
    assert model_flop_utilisation(config, 50.0, None) is None
    # Two copies of each token: twice the places, and as many more that each of them sees.
    copied = dataclasses.replace(config, data=DataConfig(sequence_length=7, copies=2))
    more = forward + 2 * (2 * 2 * 2 * 4) * (14 - 7) / 2
    assert model_flop_utilisation(copied, 50.0, chip) == pytest.approx(2 * 3 * more * 50 / 4e6)


def events(directory) -> dict[tuple[int, str], float]:
    """(step, name) -> value of every scalar in the TensorBoard files."""
    found = {}
    for event in logged(directory):
        found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    return found


def logged(directory):
    """All events."""

    for path in directory.glob("events.out.tfevents.*"):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            yield Event.FromString(content[at + 12 : at + 12 + length])
            at += length + 16


def test_both_files_get_the_same(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {"loss": 2.5, "experts/x/gini": 0.25})
    writer.write(2, {"loss": 1.5})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5, "experts/x/gini": 0.25}, {"step": 2, "loss": 1.5}]
    assert events(tmp_path) == {(1, "loss"): 2.5, (1, "experts/x/gini"): 0.25, (2, "loss"): 1.5}


def test_resuming_removes_what_came_after_the_checkpoint(tmp_path):
    """Also half a line, as a kill leaves behind."""
    writer = MetricsWriter(tmp_path, 0)
    for step in (1, 2, 3, 4):
        writer.write(step, {"loss": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    writer = MetricsWriter(tmp_path, 2)
    writer.write(3, {"loss": 7.0})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 7.0},
    ]


def test_a_file_that_somebody_removes_begins_anew(tmp_path):
    """With the folder, too; what can't be kept at all is said at the end."""
    said: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    writer = MetricsWriter(folder, 0, said.append)
    writer.write(1, {"loss": 3.0})
    folder.rename(tmp_path / "elsewhere")
    for step in (2, 3):
        writer.write(step, {"loss": 2.0})
    assert read_metrics(folder) == [{"step": 2, "loss": 2.0}, {"step": 3, "loss": 2.0}]
    assert len(said) == 1 and "is gone, and with it the records so far" in said[0]
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    writer.write(4, {"loss": 2.0})
    writer.close()
    assert "1 records are lost" in said[-1]


def test_a_run_that_begins_again_leaves_no_events_twice(tmp_path):
    """What TensorBoard is told to forget: all steps from the one that comes next."""
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {"loss": 3.0})
    writer.rewind(0)
    writer.close()
    assert [found.session_log.status for found in logged(tmp_path) if found.HasField("session_log")] == [1, 1]
    assert all(found.step == 1 for found in logged(tmp_path) if found.HasField("session_log"))


@pytest.mark.parametrize(
    ("family", "record", "label", "loss"),
    [
        ("dreamer", {}, "training", 3.0),
        ("ouro", {}, "training, as it is minimised", 3.0),
        ("universal", {"last_loss": 2.0}, "training", 2.0),
    ],
)
def test_what_the_curve_of_training_is(family, record, label, loss, tmp_path, monkeypatch):
    """Cross-entropy, as what is held out; or it is said that it is more."""
    (tmp_path / "config.yaml").write_text(f"model: {{family: {family}}}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0, **record}) + "\n")
    drawn = []
    monkeypatch.setattr(figures, "draw_curves", lambda curves, *_, **how: drawn.append(curves))
    figures.draw_figures(tmp_path)
    assert drawn[0] == {label: [(1, loss)], "held-out": []}


def test_no_metrics_yet(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.slow
def test_the_events_dont_import_torch(tmp_path):
    """tensorboardX does wherever torch is installed; it took a quarter of a training's start. Later it is there."""
    code = (
        "import importlib.util, pathlib, sys; from dreamer_jax.runs.metrics import MetricsWriter\n"
        f"MetricsWriter(pathlib.Path({str(tmp_path)!r}), 0).close()\n"
        "assert 'tensorboardX' in sys.modules and 'torch' not in sys.modules\n"
        "importlib.util.find_spec('torch')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
