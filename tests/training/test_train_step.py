"""The train step: equal on one device and many, whole and in microbatches; padding; balancing; precision."""

import functools

import jax
import numpy as np
import pytest

from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training.state import abstract_state, create_state
from dreamer_jax.training.train_step import make_train_step
from tests.training.cases import random_batch, tiny_config

VARIANTS = ["DR+DA", pytest.param("LA", marks=pytest.mark.slow)]


@functools.cache
def fresh(variant: str) -> TrainState:
    """On the host: the step donates its state, and a donated array can't be used twice."""
    config = tiny_config(model__variant=variant)
    return jax.device_get(create_state(config, make_mesh(config.mesh)))


@functools.cache
def compiled(variant: str, microbatches: int = 1, devices: int = 1):
    config = tiny_config(model__variant=variant, training__microbatches=microbatches, mesh__data=(devices,))
    return make_train_step(config, make_mesh(config.mesh))


def run(variant: str, batches, **how):
    """(state, metrics) after each batch, on the host: arrays of another sharding would compile the step again."""
    state, found = fresh(variant), []
    for batch in batches:
        state, metrics = jax.device_get(compiled(variant, **how)(state, batch))
        found.append((state, metrics))
    return found


def assert_close(actual, expected, tolerance: float = 2e-5) -> None:
    """Every leaf to `tolerance` of its largest magnitude."""

    def check(path, a, b):
        assert a.dtype == b.dtype
        scale = np.abs(b).max() if b.size else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, actual, expected)


@functools.cache
def three_steps(variant: str):
    return run(variant, [random_batch(seed) for seed in (1, 2, 3)])


@pytest.mark.slow_but("4 microbatches")
@pytest.mark.parametrize("how", [{"microbatches": 4}, {"devices": 8}], ids=["4 microbatches", "8 devices"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_result_however_it_is_divided(variant, how):
    """Unequal parts, one microbatch and two devices with padding only: a mean of means would show."""
    for found, expected in zip(
        run(variant, [random_batch(s) for s in (1, 2, 3)], **how), three_steps(variant), strict=True
    ):
        (state, metrics), (expected_state, expected_metrics) = found, expected
        for name, counts in expected_metrics["counts"].items():
            np.testing.assert_array_equal(metrics["counts"][name], counts)
        assert_close(metrics, expected_metrics)
        assert_close(state.optimizer, expected_state.optimizer)
        assert_close(state.params, expected_state.params)
        assert_close(state.model_state, expected_state.model_state, 1e-6)
        assert state.step == expected_state.step


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_and_balancing(variant):
    """Every real token counts k times a depth; each bias moves by rate * sign(median - N) of the step's counts."""
    config = tiny_config(model__variant=variant).model
    before = fresh(variant).model_state["balancing"]
    for seed, (state, metrics) in enumerate(three_steps(variant), 1):
        real = int((random_batch(seed)["segment_ids"] > 0).sum())
        assert set(metrics["counts"]) == set(before) >= {"expert_attention"}
        for name, counts in metrics["counts"].items():
            expert = name == "expert_attention"
            np.testing.assert_array_equal(counts.sum(1), [real * (config.experts_per_token if expert else 1)] * 2)
            n = counts if variant == "LA" else counts.sum(0)
            rate = config.expert_bias_rate if expert else config.attention_bias_rate
            moved = rate * np.sign(np.median(n, axis=-1, keepdims=True) - n)
            np.testing.assert_allclose(state.model_state["balancing"][name], before[name] + moved, atol=1e-7)
            assert np.any(moved)
        before = state.model_state["balancing"]


@pytest.mark.slow
def test_biases_may_move_after_each_microbatch():
    """As they would in steps of a part of the batch each, if no weight moved in between."""
    config = tiny_config(training__microbatches=2, training__balance="microbatch", mesh__data=(2,))
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    in_parts, whole = make_train_step(config, mesh), make_train_step(tiny_config(mesh__data=(2,)), mesh)
    batch, before = random_batch(1), fresh("DR+DA")
    rows = len(batch["tokens"]) // 4
    state, metrics = jax.device_get(in_parts(before, batch))
    wanted, counts = before, []
    for part in range(2):  # each of the two devices has half of the rows, and of those half in a microbatch
        own = [row for device in range(2) for row in range((2 * device + part) * rows, (2 * device + part + 1) * rows)]
        one = {name: value[np.array(own)] for name, value in batch.items()}
        after, its = jax.device_get(whole(wanted, one))
        wanted = before.replace(model_state=after.model_state)
        counts.append(its["counts"])
    jax.tree.map(np.testing.assert_array_equal, state.model_state, wanted.model_state)
    jax.tree.map(lambda n, *parts: np.testing.assert_array_equal(n, sum(parts)), metrics["counts"], *counts)
    moved = state.model_state["balancing"]["expert_attention"] - before.model_state["balancing"]["expert_attention"]
    assert np.abs(moved).max() == pytest.approx(2 * config.model.expert_bias_rate)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_stands_in_padding_does_not_matter(variant):
    """Other tokens, targets and positions in padding: the same bits."""
    batch, other = random_batch(1), random_batch(99)
    padding = batch["segment_ids"] == 0
    assert padding.sum() > 20
    changed = {**batch, **{k: np.where(padding, other[k] + 3, batch[k]) for k in ("targets", "positions")}}
    changed["tokens"] = np.where(padding, other["tokens"], batch["tokens"])
    state, metrics = run(variant, [changed])[0]
    expected_state, expected_metrics = three_steps(variant)[0]
    jax.tree.map(np.testing.assert_array_equal, metrics, expected_metrics)
    assert_close(state.params, expected_state.params, 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_on_one_batch_learns_it(variant):
    """The gradient points downhill: the loss of a repeated batch falls by more than a third in 30 steps."""
    losses = [metrics["loss"] for _, metrics in run(variant, [random_batch(1)] * 30)]
    assert losses[0] == pytest.approx(np.log(23), rel=0.1)
    assert losses[-1] < 0.66 * losses[0]


def infinite_loss(params):
    """One number of the head is infinite; the trunk, and so what balancing counts, is fine."""
    params["head"][3, 5] = np.inf


def infinite_gradient(params):
    """Logits and loss are of usual size, but the gradient of LA's last scale is too large to be squared."""
    params["head"] *= 1e25
    params["final_norm"]["scale"] *= 1e-25


@pytest.mark.parametrize(
    ("variant", "damage"),
    [
        *(pytest.param("LA", damage, marks=pytest.mark.slow) for damage in (infinite_loss, infinite_gradient)),
        ("DR+DA", infinite_loss),
    ],
)
def test_a_step_without_finite_loss_and_gradient_changes_nothing(variant, damage):
    """Parameters, moments, their counts and balancing keep their bits; only the step is counted."""
    params = jax.tree.map(np.array, fresh(variant).params)
    damage(params)
    before = fresh(variant).replace(params=params)
    state, metrics = jax.device_get(compiled(variant)(before, random_batch(1)))
    assert metrics["skipped"] == 1 and state.step == before.step + 1
    assert np.isfinite(metrics["loss"]) == (damage is infinite_gradient)
    assert not np.isfinite(metrics["gradient_norm"])
    jax.tree.map(np.testing.assert_array_equal, state.replace(step=before.step), before)
    after, metrics = three_steps(variant)[0]  # of the same batch and balancing, with a finite loss
    assert metrics["skipped"] == 0
    for kept, moved in ((before.optimizer, after.optimizer), (before.model_state, after.model_state)):
        assert not all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (kept, moved)), strict=True))


def test_the_learning_rate_is_the_one_that_is_used():
    """A skipped step takes none of the warm-up: the step after it has the rate that the skipped one would have had."""
    config = tiny_config(model__variant="LA", training__warmup_steps=100)
    step = make_train_step(config, make_mesh(config.mesh))
    damaged = jax.tree.map(np.array, fresh("LA").params)
    infinite_loss(damaged)
    state, first = jax.device_get(step(fresh("LA").replace(params=damaged), random_batch(1)))
    state, second = jax.device_get(step(state.replace(params=fresh("LA").params), random_batch(1)))
    assert [first["skipped"], second["skipped"], state.step] == [1, 0, 2]
    rate = 1e-2 / 100
    np.testing.assert_allclose([first["learning_rate"], second["learning_rate"]], rate, rtol=1e-6)
    # Scales aren't decayed, and Adam's first update is nearly rate * sign(gradient) where the gradient is large.
    moved = np.abs(state.params["final_norm"]["scale"] - fresh("LA").params["final_norm"]["scale"])
    assert moved.max() == pytest.approx(rate, rel=0.05)


def test_metrics_of_a_step():
    """Learning rate of this update; gradient norm before clipping, as the first moment of the first step shows."""
    state, metrics = three_steps("DR+DA")[0]
    rates = [float(m["learning_rate"]) for _, m in three_steps("DR+DA")]
    np.testing.assert_allclose(rates, [5e-3, 1e-2, 1e-2], rtol=1e-6)
    (first_moment,) = (
        part.mu for part in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    )
    clipped = np.sqrt(sum((10 * m.astype(np.float64)) ** 2 for m in map(np.linalg.norm, jax.tree.leaves(first_moment))))
    assert clipped == pytest.approx(min(0.5, float(metrics["gradient_norm"])), rel=1e-4)


@pytest.mark.slow
def test_bfloat16_computes_on_float32_weights():
    """Masters and optimizer state are float32, and take updates far below bfloat16's resolution."""
    config = tiny_config(model__dtype="bfloat16", training__learning_rate=1e-6, training__weight_decay=0.0)
    state, metrics = make_train_step(config, make_mesh(config.mesh))(fresh("DR+DA"), random_batch(1))
    floats = [leaf for leaf in jax.tree.leaves((state, metrics)) if np.issubdtype(leaf.dtype, np.floating)]
    assert {str(leaf.dtype) for leaf in floats} == {"float32"}
    assert all(leaf.dtype != jax.numpy.bfloat16 for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(metrics["loss"], three_steps("DR+DA")[0][1]["loss"], rtol=0.02)
    moved = np.abs(np.asarray(state.params["head"]) - fresh("DR+DA").params["head"])
    assert 0 < moved.max() < 1e-6 and np.mean(moved > 0) > 0.5


@pytest.mark.slow_but("none-1", "full-2")
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("attention", 1), ("full", 2)])
def test_only_a_whole_layer_selects_again(remat, times):
    """What routers selected is kept otherwise: each of the three in a layer selects once, or again in the backward."""
    config = tiny_config(training__remat=remat)
    mesh = make_mesh(config.mesh)
    traced = str(jax.make_jaxpr(make_train_step(config, mesh))(abstract_state(config, mesh), random_batch(1)))
    assert traced.count(" top_k[") == 3 * times
