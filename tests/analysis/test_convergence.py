"""What is asked of models that get their input anew at every depth, against plain NumPy on the states of `forward`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.collection import collect, make_observer
from dreamer_jax.analysis.convergence import EDGES, SETTLED, change, count_changes, steps_to_settle
from dreamer_jax.analysis.figures import make_figures
from dreamer_jax.analysis.observation import choose_targets, observe_batch
from dreamer_jax.analysis.summary import scalars, summarise
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.parallel import make_mesh
from tests.analysis.test_observation import EIGHT, ONE, assert_equal, make_batch
from tests.families.cases import REAL, SEGMENT_IDS, TINY_MODELS, random_weights, small_config
from tests.families.puzzle_cases import puzzles
from tests.training.cases import random_batch

TINY = HuginnConfig(
    depth=5,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    hidden_size=16,
    heads=2,
    kv_heads=2,
    head_size=8,
    mlp_size=24,
    vocab_size=23,
    dtype="float32",
)


@pytest.fixture(scope="module")
def params() -> Any:
    """A core that hardly looks at its state, so that some tokens settle and others don't."""
    params = jax.tree.map(np.array, initialise(build(TINY), jax.random.key(0))[0])
    params["adapter"][: TINY.hidden_size] *= 0.4
    return jax.tree.map(jnp.asarray, params)


def states_of(params: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """States [L+1, B, S, h], and logits [L, B, S, V] of a model that is as deep as each depth, in float64."""
    family, states, logits = build(TINY), [], []
    for depth in range(1, TINY.depth + 1):
        passed = forward(family, params, {}, batch, depth)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        states.append(passed.state)
        logits.append(family.logits(params, hidden))
        start = family.start(passed.inputs, passed.context)
    return np.asarray([start, *states], np.float64), np.asarray(logits, np.float64)


def test_change_is_relative_to_the_new_state():
    before, after = np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[6.0, 8.0], [1.0, 0.0]])
    np.testing.assert_allclose(change(before, after), [0.5, 0])
    assert change(np.ones(2), np.zeros(2)) > 1e20  # nothing is divided by 0


def test_a_token_has_settled_when_all_that_follows_is_small():
    big, small = 2 * SETTLED, SETTLED / 2
    by_token = {
        (small, small, small): 0,
        (big, small, small): 1,
        (big, small, big): 3,
        (small, big, small): 2,
        (SETTLED, small, small): 1,
        (small, small, np.nan): 3,
    }
    changes = np.array(list(by_token), np.float32).T
    assert steps_to_settle(changes).tolist() == list(by_token.values())
    real = np.array([True, True, True, False, True, True])
    counted = count_changes(changes, real)
    assert counted["settled"].tolist() == [1, 2, 0, 2]
    assert np.sum(counted["changes"], axis=1).tolist() == [5, 5, 5]


def test_changes_are_counted_between_edges():
    changes = np.array([[1e-9, 2e-4, 0.5, 99.0]], np.float32)
    found = np.flatnonzero(count_changes(changes, np.ones(4, bool))["changes"][0])
    assert found.tolist() == [0, np.searchsorted(EDGES, 2e-4) - 1, np.searchsorted(EDGES, 0.5) - 1, len(EDGES) - 2]


def test_equal_to_numpy(params):
    batch = make_batch(TINY)
    sums = jax.device_get(make_observer(TINY, ONE)(params, {}, batch))
    states, logits = states_of(params, batch)
    changes = (np.linalg.norm(np.diff(states, axis=0), axis=-1) / np.linalg.norm(states[1:], axis=-1))[:, REAL]
    assert np.abs(changes - SETTLED).min() > 1e-5  # no count hangs on rounding
    steps = [max([l + 1 for l in range(TINY.depth) if token[l] >= SETTLED], default=0) for token in changes.T]
    np.testing.assert_array_equal(sums["settled"], np.bincount(steps, minlength=TINY.depth + 1))
    assert np.count_nonzero(sums["settled"]) > 1
    assert np.abs(changes[..., None] / EDGES - 1).min() > 1e-5
    histogram = [np.histogram(row, EDGES)[0] for row in changes]
    np.testing.assert_array_equal(sums["changes"], histogram)
    chosen = batch["loss_mask"]  # fewer than LENS_TARGETS in every row, so all are read
    rows, columns, lens = choose_targets(batch["loss_mask"], batch["answer_mask"])
    assert np.sum(lens["counted"]) == chosen.sum() and len(rows) == len(columns)
    logs = logits[:, chosen] - np.log(np.exp(logits[:, chosen]).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(sums["lens_entropy"], -(np.exp(logs) * logs).sum(axis=(1, 2)), rtol=1e-5)
    # The lens goes through the coda: it is what a model of that depth predicts.
    losses = -np.take_along_axis(logs, batch["targets"][chosen][None, :, None], axis=2)
    np.testing.assert_allclose(sums["lens_loss"], losses.sum(axis=(1, 2)), rtol=1e-5)


@pytest.mark.slow
def test_eight_devices_and_batches_add_up(params):
    parts = [make_batch(TINY, seed) for seed in range(3)]
    batch = {name: np.concatenate([part[name] for part in parts])[:8] for name in parts[0]}
    one = collect(TINY, params, {}, [batch], ONE)
    assert_equal(collect(TINY, params, {}, [batch], EIGHT), one, int(one["tokens"]))
    halves = [{name: values[half] for name, values in batch.items()} for half in (slice(0, 4), slice(4, 8))]
    assert_equal(collect(TINY, params, {}, halves, ONE), one, int(one["tokens"]))


def test_summary_figures_and_scalars(params):
    sums = collect(TINY, params, {}, [make_batch(TINY)], ONE)
    summary = summarise(TINY, sums, {})
    found = summary["convergence"]
    assert found["threshold"] == SETTLED and sum(found["settled"]) == summary["tokens"] == (SEGMENT_IDS > 0).sum()
    np.testing.assert_allclose(np.sum(found["changes"], axis=1), 1)
    assert len(summary["lens"]["entropy"]) == TINY.depth and "observed" not in summary
    assert all(0 <= value <= np.log(TINY.vocab_size) for value in summary["lens"]["entropy"])
    names = [figure.name for figure in make_figures(summary)]
    assert names == ["lens", "entropy", "residual", "settling"]
    values = scalars(summary)
    assert values["analysis/convergence/settled"] == sum(found["settled"][:-1]) / summary["tokens"]
    assert values["analysis/lens/entropy/4"] == summary["lens"]["entropy"][-1]


def test_bfloat16_runs(params):
    sums = collect(dataclasses.replace(TINY, dtype="bfloat16"), params, {}, [make_batch(TINY)], ONE)
    assert sums["settled"].sum() == REAL.sum() and np.isfinite(sums["lens_entropy"]).all()


def test_other_families_get_nothing_of_it():
    config = small_config("DR")
    weights, bias = random_weights(config)
    sums = collect(config, weights, {"balancing": bias}, [make_batch(config)], make_mesh(MeshConfig(data=(1,))))
    assert not {"lens_entropy", "settled", "changes"} & sums.keys()
    summary = summarise(config, sums, {"balancing": bias})
    assert "convergence" not in summary and "entropy" not in summary["lens"]


@pytest.mark.slow
def test_a_first_state_of_zero_has_no_direction():
    """AlgoFormer with model.inject add starts from one: nothing is 1e29 times as far from it."""
    config = dataclasses.replace(TINY_MODELS["algoformer"], inject="add")
    weights = initialise(build(config), jax.random.key(0))
    batch = random_batch(0)
    summary = summarise(config, collect(config, *weights, [batch], ONE), {})
    for name in ("cosine", "distance"):
        first, *others = summary["residual"][name]
        assert first is None and all(0 < value < 10 for value in others)
        assert {f"analysis/residual/{name}/{l}" for l in range(config.depth)} - scalars(summary).keys() == {
            f"analysis/residual/{name}/0"
        }
    assert all(value > 0 for value in summary["residual"]["norm"])
    assert all(figure.render("svg") for figure in make_figures(summary) if figure.name == "residual")


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_is_seen_of_every_family(name):
    """Traced only: convergence of all that inject their inputs, entropy of those among them that generate."""
    config = TINY_MODELS[name]
    family = build(config)
    batch = random_batch(0) if family.flags.generates else puzzles(config)
    weights = jax.eval_shape(lambda: initialise(family, jax.random.key(0)))
    sums = jax.eval_shape(lambda *arrays: observe_batch(config, *arrays), *weights, batch)
    assert {"settled", "changes"} & sums.keys() == ({"settled", "changes"} if family.flags.injects_inputs else set())
    assert ("lens_entropy" in sums) == (family.flags.injects_inputs and family.flags.generates)
    assert "change" not in sums


def test_the_largest_entropy_is_of_what_a_head_of_moeut_chooses_among():
    """Its heads have attention experts of their own, which stand in a row in the counts."""
    config = TINY_MODELS["moeut"]
    weights = jax.eval_shape(lambda: initialise(build(config), jax.random.key(0)))
    sums = jax.eval_shape(lambda *arrays: observe_batch(config, *arrays), *weights, random_batch(0))
    routers = summarise(config, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), sums), {})["routers"]
    assert len(routers["values_0"]["counts"][0]) == config.heads * config.attention_experts
    largest = {name: router["largest_entropy"] for name, router in routers.items()}
    experts = dict.fromkeys(("outputs_0", "values_0"), config.attention_experts) | {"experts_0": config.num_experts}
    assert largest == pytest.approx({name: np.log(count) for name, count in experts.items()})
