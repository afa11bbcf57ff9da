"""`dreamer bench train`: what is measured, in which order, and what it refuses."""

import importlib.util
import json

import numpy as np
import pytest

from dreamer_jax.benchmarks import qwen3, training
from dreamer_jax.budget import analytic
from dreamer_jax.cli import bench
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config, to_yaml
from dreamer_jax.families import build
from dreamer_jax.training.work import work_of
from tests.training.cases import tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Variant -> configuration file."""
    directory, paths = tmp_path_factory.mktemp("configs"), {}
    for variant in ("LA", "DR+DA"):
        path = directory / f"{variant}.yaml"
        path.write_text(to_yaml(tiny_config(model__variant=variant)))
        paths[variant] = str(path)
    return paths


def test_measures_the_real_step(files, capsys):
    assert main(["bench", "train", "--config", files["DR+DA"], "--steps", "5", "--json", "--training.steps=1"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert "compiled in" in output.err and "steps 5/5: ours" in output.err
    ours = found["ours"]
    assert ours["steps"] == 5 and "theirs" not in found and "ratio" not in found
    assert ours["tokens_per_second"] == pytest.approx(8 * 12 / ours["seconds"])
    assert ours["compile_seconds"] > 0.1 and ours["startup_cpu_seconds"] > 0.1
    assert "model_flop_utilisation" not in ours  # a CPU's peak isn't known
    text = bench._text(found).splitlines()
    assert text[2].startswith("ours:") and "medians of 5" in text[2]


def test_where_depths_are_drawn_means_count():
    """Two quick steps and a slow one: twelve rows of 8 tokens take a second each on average."""
    times = [[(0.5, 1.0), (0.5, 1.0)], [(2.0, 4.0)]]
    fixed = training._summary(tiny_config(), times)
    assert (fixed["average"], fixed["seconds"], fixed["cpu_seconds"]) == ("median", 0.5, 1.0)
    drawn = tiny_config(model__variant="DR", recurrence__draw="uniform", recurrence__most=4)
    found = training._summary(drawn, times)
    assert (found["average"], found["seconds"], found["cpu_seconds"]) == ("mean", 1.0, 2.0)
    assert found["tokens_per_second"] == 8 * 12
    flops = analytic.training_flops(build(drawn.model), 12, work_of(drawn, 3))[0]
    assert found["model_flops_per_second"] == pytest.approx(8 * 12 * flops)


def test_a_file_takes_no_trace(files, capsys):
    assert main(["bench", "train", "--config", files["LA"], "--profile", files["LA"]]) == 2
    said = capsys.readouterr().err
    assert "LA.yaml: is a file; name a folder" in said and "compiling" not in said


def test_sides_take_turns_on_the_same_tokens():
    """Two settling steps each, then blocks of four; the side that goes first alternates."""
    config, seen = tiny_config(), []
    sides = {
        name: lambda tokens, targets, name=name: seen.append((name, tokens.tobytes())) for name in ("ours", "theirs")
    }
    blocks = training._interleave(config, sides, 10, lambda line: None)
    assert [name for name, _ in seen[:4]] == ["ours", "theirs"] * 2
    order = ["ours"] * 4 + ["theirs"] * 8 + ["ours"] * 4 + ["ours"] * 2 + ["theirs"] * 2
    assert [name for name, _ in seen[4:]] == order
    tokens = {name: [t for n, t in seen if n == name] for name in sides}
    assert tokens["ours"] == tokens["theirs"] and len(set(tokens["ours"])) == 12
    assert {name: [len(b) for b in each] for name, each in blocks.items()} == {name: [4, 4, 2] for name in sides}


def test_ratio_by_hand():
    """Median over blocks of their median time over ours."""
    ours = [[(1.0, 2.0), (1.0, 2.0), (9.0, 9.0)], [(2.0, 4.0)], [(1.0, 1.0)]]
    theirs = [[(1.5, 2.0), (1.5, 2.0), (0.1, 0.1)], [(2.0, 2.0)], [(3.0, 4.0)]]
    assert training._ratio(ours, theirs) == {
        "wall": {"median": 1.5, "least": 1.0, "most": 3.0},
        "cpu": {"median": 1.0, "least": 0.5, "most": 4.0},
        "blocks": 3,
    }


def test_batches_are_random_text_shifted_by_one():
    config = tiny_config()
    tokens, targets = training.random_batch(config, 3)
    assert tokens.shape == targets.shape == (8, 12) and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.min() >= 0 and tokens.max() < config.model.vocab_size
    assert not np.array_equal(tokens, training.random_batch(config, 4)[0])


@pytest.mark.slow
def test_a_model_that_is_shown_its_steps_and_a_puzzle_can_be_timed():
    """Their batches hold more than tokens; a token that stands twice has two places."""
    task = {"data__source": "task", "data__task": "arithmetic", "data__difficulty": 2}
    shown = tiny_config(**task, recurrence__draw="fixed", recurrence__steps=1.0)
    copied = tiny_config(data__copies=2)
    for config, places in ((shown, 12), (copied, 24), (load_config("graph_laptop").config, None)):
        tokens, targets = training.random_batch(config, 0)
        assert places is None or tokens.shape == (8, places)
        assert np.isfinite(training.OurStep(config)(tokens, targets))
    once, twice = (training._summary(c, [[(1.0, 1.0)]]) for c in (tiny_config(data__sequence_length=24), copied))
    assert twice["model_flops_per_second"] == once["model_flops_per_second"]  # as many places
    assert 2 * twice["tokens_per_second"] == once["tokens_per_second"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bench: which one?\nusage: dreamer bench train"),
        (["trian"], "did you mean 'bench train'?"),
        (["train"], "--config"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", "--config", "LA", "--steps", "0"], "'0' is not an integer of 1 or more"),
        (["train", "--config", "LA", "--against", "tensorflow"], "tensorflow"),
        (["train", "--config", "LA", "--model.depht", "2"], "did you mean '--model.depth'?"),
        (["train", "--config", "DR+DA", "--against", "transformers"], "model.variant DR+DA: Qwen3-MoE has distinct"),
        (["train", "--config", "LA", "--against=transformers", "--model.dtype=bfloat16"], "model.dtype bfloat16"),
        (["train", "--config", "LA", "--against=transformers", "--recurrence.draw=uniform"], "all its layers"),
    ],
)
def test_mistakes(words, message, files, capsys):
    assert main(["bench", *(files.get(word, word) for word in words)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("dreamer: error: ") and message in output.err and output.out == ""


def test_missing_extra_is_named(files, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert main(["bench", "train", "--config", files["LA"], "--against", "transformers"]) == 2
    assert "needs torch" in (error := capsys.readouterr().err) and "pip install -e '.[bench]'" in error


def test_peer_has_our_sizes_and_learns():
    """Same parameters but for the routers: ours are low-rank, with norms; Qwen's is one matrix."""
    pytest.importorskip("transformers", minversion="5")
    config = tiny_config(model__variant="LA", training__learning_rate=1e-2)
    model = config.model
    tokens, targets = training.random_batch(config, 0)
    losses = {}
    for experts in qwen3.EXPERTS:
        step = qwen3.QwenStep(config, experts)
        losses[experts] = [step(tokens, targets) for _ in range(30)]
        attention = 16 * (2 + 2 * 1) * 8 + 2 * 8 * 16 + 2 * 8  # projections, and the norms of q and k
        layer = attention + 2 * 16 + model.num_experts * (16 + 3 * 8 * 16)
        assert step.parameters == 2 * layer + 2 * model.vocab_size * 16 + 16
    np.testing.assert_allclose(losses["eager"][:3], losses["grouped_mm"][:3], rtol=1e-4)
    assert losses["eager"][0] == pytest.approx(np.log(23), rel=0.1) and losses["eager"][-1] < 0.8 * losses["eager"][0]
