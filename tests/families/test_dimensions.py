"""Dimensions of the mixture that each token chooses by its state: NumPy, plain autodiff, limit cases, decoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.collection import add
from dreamer_jax.analysis.observation import observe_batch
from dreamer_jax.analysis.summary import summarise
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from tests.families.cases import (
    PACKED,
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    flying,
    jitted_forward,
    passed_whole,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward
from tests.families.test_gradients import assert_same, model_loss, unrolled_gradient

TOLERANCE = 1e-5
SAFE_MARGIN = 5e-6
SMALL: dict[str, Any] = {"hidden_size": 12, "num_experts": 4}
TWO_OF_THREE = small_config("DR+DA", **SMALL, dimensions_per_token=2)
CASES = {
    "two of three": TWO_OF_THREE,
    "one of two layered": small_config("LA", **SMALL, dimensions_per_token=1),
    "with slots": small_config("DR+DA", "sequential", **SMALL, dimensions_per_token=2, pa_slots=3, pa_head_size=8),
    "a state of depths": small_config("DR+DA", "parallel", **SMALL, dimensions_per_token=1, da_form="gated_recurrent"),
}
ALL = pytest.mark.parametrize("name", CASES)


@pytest.mark.slow_but("two of three", "layered", "with slots")
@ALL
def test_equal_to_numpy(name):
    """Packed rows; experts that answer a token which doesn't take it aren't counted."""
    config = CASES[name]
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (3, 2):
        expected = forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > SAFE_MARGIN, "near tie: choose another seed"
        found = jitted_forward(config)(params, bias, tokens, *PACKED, depth)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < TOLERANCE
        assert set(found.counts) == set(expected.counts)
        for router, counts in expected.counts.items():
            np.testing.assert_array_equal(np.asarray(found.counts[router])[:depth], counts, err_msg=router)
    taken = expected.counts["dimensions"]
    assert (taken.sum(axis=1) == config.dimensions_per_token * REAL.sum()).all() and (taken > 0).all()
    answered = expected.counts["expert_attention"].sum(axis=1)
    np.testing.assert_array_equal(answered, config.experts_per_token * taken[:, -1])


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        pytest.param("two of three", "full", marks=pytest.mark.slow),
        ("one of two layered", "attention"),
        pytest.param("with slots", "none", marks=pytest.mark.slow),
        pytest.param("a state of depths", "full", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_an_unrolled_loop(name, remat):
    gradient = jax.jit(jax.value_and_grad(functools.partial(model_loss, config=CASES[name], remat=remat)))
    if name == "a state of depths":  # the unrolled loop has a cache only
        wanted = jax.jit(jax.value_and_grad(functools.partial(model_loss, config=CASES[name], remat="none")))
        assert_same(gradient(*random_weights(CASES[name])), wanted(*random_weights(CASES[name])))
    else:
        assert_same(gradient(*random_weights(CASES[name])), unrolled_gradient(CASES[name]))


@pytest.mark.slow
def test_a_router_learns_by_the_gates_of_what_is_taken():
    """Its gradient is the slope of the NumPy model's loss. Without shared experts, whose scores have no gradient."""
    config = dataclasses.replace(TWO_OF_THREE, shared_expert=False)
    params, bias = random_weights(config)
    tokens, step = random_tokens(config), 1e-6
    along = np.random.default_rng(3).normal(size=params["layer"]["dimensions"]["router"]["query"].shape)
    gradient = jax.jit(jax.grad(functools.partial(model_loss, config=config, remat="full")))(params, bias)
    found = np.sum(gradient["layer"]["dimensions"]["router"]["query"] * along)

    def loss(shift):
        layer = params["layer"]
        router = {**layer["dimensions"]["router"], "query": layer["dimensions"]["router"]["query"] + shift * along}
        moved = {**params, "layer": {**layer, "dimensions": {"router": router}}}
        logits = forward(config, moved, bias, tokens, *PACKED).logits[REAL]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return -logs[np.arange(len(logs)), np.roll(tokens, -1, axis=1)[REAL]].mean()

    assert found == pytest.approx((loss(step) - loss(-step)) / (2 * step), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["DR+DA", "LA"])
def test_who_takes_all_with_a_router_that_prefers_none_has_the_model_without_it(variant):
    """Loss and the gradients of everything else, to the bit but for the order of additions."""
    plain = small_config(variant, **SMALL)
    config = dataclasses.replace(plain, dimensions_per_token=len(plain.dimensions))
    params, bias = random_weights(config)
    scope = "layer" if plain.recurrent else "layers"
    its = params[scope]
    router = {**its["dimensions"]["router"], "keys": 0 * its["dimensions"]["router"]["keys"]}
    params = {**params, scope: {**its, "dimensions": {"router": router}}}
    loss, gradient = jax.jit(jax.value_and_grad(functools.partial(model_loss, config=config, remat="full")))(
        params, bias
    )
    without = {name: part for name, part in its.items() if name not in ("dimensions", "dimension_norm")}
    rest = {name: each for name, each in bias.items() if name != "dimensions"}
    expected = jax.jit(jax.value_and_grad(functools.partial(model_loss, config=plain, remat="full")))(
        {**params, scope: without}, rest
    )
    kept = {name: part for name, part in gradient[scope].items() if name in without}
    assert_same((loss, {**gradient, scope: kept}), expected, 1e-6)


@pytest.mark.slow_but("None-with slots", "None-two of three")
@ALL
@pytest.mark.parametrize("depth", [None, 5])
def test_decoding_is_the_whole_pass(name, depth):
    """Every position at a depth of its own; one that doesn't attend leaves keys for later ones all the same."""
    config = CASES[name]
    if depth and not config.recurrent:
        pytest.skip("layers of its own")
    _, found = flying(config, depth)
    assert relative_error(found, passed_whole(config, depth)) < TOLERANCE


@ALL
def test_the_program_has_the_products_that_are_counted(name):
    assert program.count(CASES[name], 6) == program.expected(CASES[name], 6)


def test_budgets_add_the_router_and_save_nothing():
    plain, family = build(dataclasses.replace(TWO_OF_THREE, dimensions_per_token=0)), build(TWO_OF_THREE)
    more = {part: n - analytic.parameters(plain)[part] for part, n in analytic.parameters(family).items()}
    assert more.pop("routers") == (12 + 3 + 2) * 12 + 12 and not any(more.values())  # r is 12, too; and a norm
    flops = {part: n - analytic.matmul_flops(plain, 9)[part] for part, n in analytic.matmul_flops(family, 9).items()}
    assert flops.pop("routers") == 3 * 2 * (12 + 3) * 12 and not any(flops.values())
    assert memory.caches(family, 9) == memory.caches(plain, 9)


def test_a_bias_moves_choices_towards_what_is_taken_less():
    config = dataclasses.replace(TWO_OF_THREE, attention_bias_rate=0.05)
    params, bias = random_weights(config)
    family, batch, spread = build(config), (random_tokens(config), *PACKED, 3), []
    update = jax.jit(lambda bias, counts: family.update({"balancing": bias}, counts, jnp.int32(0))["balancing"])
    for _ in range(30):
        counts = jitted_forward(config)(params, bias, *batch).counts
        spread.append(np.asarray(counts["dimensions"]).sum(axis=0).std())
        bias = update(bias, counts)
    assert min(spread[-10:]) < 0.5 * spread[0]


def test_analysis_tells_what_is_taken_at_each_depth():
    params, bias = random_weights(TWO_OF_THREE)
    tokens = random_tokens(TWO_OF_THREE)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": SEGMENT_IDS, "positions": POSITIONS}
    batch |= {"loss_mask": REAL, "answer_mask": REAL}
    sums = jax.jit(functools.partial(observe_batch, TWO_OF_THREE))(params, {"balancing": bias}, batch)
    told = summarise(TWO_OF_THREE, add(None, sums), {"balancing": bias})["routers"]
    expected = jitted_forward(TWO_OF_THREE)(params, bias, tokens, *PACKED, 3).counts
    for name, router in told.items():
        np.testing.assert_array_equal(router["counts"], expected[name])
        assert 0 < min(router["entropy"]) <= max(router["entropy"]) <= router["largest_entropy"]
    assert set(told) == {"dimensions", "expert_attention", "sequence_attention", "depth_attention"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dimensions_per_token": 4}, "model.dimensions_per_token: 4 is more than the 3 that DR+DA has"),
        ({"variant": "LA", "dimensions_per_token": 3}, "model.dimensions_per_token: 3 is more than the 2 that LA has"),
        ({"dimensions_per_token": -1}, "model.dimensions_per_token: -1 is too small; it must be zero or more"),
        (
            {"dimensions_per_token": 2, "sa_every": 2},
            "model.dimensions_per_token: 2 can't be combined with model.sa_every 2",
        ),
        (
            {"dimensions_per_token": 2, "pa_slots": 4, "pa_every": 2},
            "model.dimensions_per_token: 2 can't be combined with model.pa_every 2",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, line):
    with pytest.raises(ConfigError) as caught:
        small_config(**{"variant": "DR+DA", **SMALL, **changes})
    assert str(caught.value).startswith(line)


def test_a_summary_says_so():
    assert TWO_OF_THREE.summary.endswith("2 of 3 dimensions a token")
