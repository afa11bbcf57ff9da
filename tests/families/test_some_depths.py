"""Dimensions of the mixture at certain depths only, against NumPy, plain autodiff and each other."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks import attention_mixture, some_depths
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from tests.families.cases import (
    PACKED,
    REAL,
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
SMALL: dict[str, Any] = {"depth": 5, "da_heads": 2, "da_kv_heads": 1, "hidden_size": 12, "num_experts": 4}
CASES = [
    {"sa_every": 2, "da_every": 3},
    {"sa_every": 3},
    {"da_every": 2, "da_window": 2},
    {"da_every": 2, "da_form": "gated_delta"},
    {"pa_slots": 3, "pa_heads": 2, "pa_head_size": 8, "pa_every": 2},
]
BOTH = small_config("DR+DA", **SMALL, **CASES[0])
SLOTS = small_config("DR+DA", **SMALL, **CASES[-1])


def full_pass(config, depth=None):
    return jitted_forward(config)(*random_weights(config), random_tokens(config), *PACKED, depth or config.depth)


@pytest.mark.slow_but("'sa_every': 2", "pa_slots", "da_window")
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_equal_to_numpy(changes):
    """Packed rows, at the trained depth and a shallower one; routers count nothing where their attention rests."""
    config = small_config("DR+DA", **SMALL, **changes)
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (5, 3):
        expected = forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > SAFE_MARGIN, "near tie: choose another seed"
        found = full_pass(config, depth)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < TOLERANCE
        for name, counts in expected.counts.items():
            np.testing.assert_array_equal(np.asarray(found.counts[name])[:depth], counts)


@functools.cache
def gradient(config, remat="full"):
    loss = functools.partial(model_loss, config=config, remat=remat)
    return jax.jit(jax.value_and_grad(loss))(*random_weights(config))


@pytest.mark.slow  # tests/families/test_gradients.py has it of whole depths
@pytest.mark.parametrize("remat", ["attention", "full", "none"])
def test_gradients_are_those_of_an_unrolled_loop(remat):
    assert_same(gradient(BOTH, remat), unrolled_gradient(BOTH))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_gradients_of_slots_are_those_of_a_choice_after_the_fact(monkeypatch, remat):
    """Plain autodiff of a loop in which they are always read, and taken at the depths that act."""
    found = gradient(SLOTS, remat)

    def chosen(slots, x, depth, context):
        out, seen = slots(x, depth, context.real)
        return jnp.where(depth.index % slots.every == 0, out, 0), seen

    monkeypatch.setattr(attention_mixture, "branch_at_some_depths", chosen)
    assert_same(found, unrolled_gradient(SLOTS))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int64])
def test_which_depths_act(dtype):
    """Every third, also where JAX counts in 64 bits."""
    with jax.enable_x64(True):
        found = some_depths._acts(SimpleNamespace(every=3), Depth(jnp.arange(7, dtype=dtype), 7))
    assert found.tolist() == [True, False, False, True, False, False, True]


@pytest.mark.slow
def test_acting_at_every_depth_changes_no_bit():
    """Of the loss and of every gradient: a setting that isn't set traces to nothing."""
    plain = small_config("DR+DA", **SMALL)
    jax.tree.map(np.testing.assert_array_equal, gradient(small_config("DR+DA", **SMALL, sa_every=1)), gradient(plain))


@pytest.mark.parametrize("remat", ["attention", "none"])
@pytest.mark.slow
def test_what_is_kept_is_no_more_than_without(remat):
    """Of a compiled gradient, by the compiler: no weights and no memory are kept once a depth."""

    def temporaries(config):
        loss = functools.partial(model_loss, config=config, remat=remat)
        compiled = jax.jit(jax.grad(loss)).lower(*random_weights(config)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(BOTH) < temporaries(small_config("DR+DA", **SMALL))


@pytest.mark.slow_but("7-{'sa_every': 2", "7-{'pa_slots")
@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("depth", [None, 7])
def test_decoding_keeps_only_depths_that_act(changes, depth):
    """Every position at its own depth, against a full pass."""
    config = small_config("DR+DA", **SMALL, **changes)
    model, found = flying(config, depth)
    every, total = changes.get("sa_every", 1), depth or 5
    assert model.empty_slots(2, 6).keys.shape[0] == -(-total // every)
    assert relative_error(found, passed_whole(config, depth)) < TOLERANCE


def test_who_stops_early_leaves_keys_for_deeper_depths():
    """The latest that was computed, in the places of the depths that act."""
    family = build(BOTH)
    slots = family.slots(2, 3, 5)  # depths 0, 2 and 4
    slots = slots._replace(keys=slots.keys + jnp.arange(1.0, 4).reshape(3, 1, 1, 1, 1))
    filled = family.refill(None, None, slots, jnp.array([1, 3]), jnp.array([0, 2])).keys[..., 0, 0]
    np.testing.assert_array_equal(filled[:, 0, 0], [1, 1, 1])  # stopped after depth 1: depth 0 is the last that acted
    np.testing.assert_array_equal(filled[:, 1, 2], [1, 2, 2])
    np.testing.assert_array_equal(filled[:, 0, 1], [1, 2, 3])


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_program_has_the_products_that_are_counted(changes):
    config = small_config("DR+DA", **SMALL, **changes)
    assert program.count(config, 6) == program.expected(config, 6)


def test_budgets_count_depths_that_act():
    """SA at 0, 2, 4; DA at 0 and 3, which sees one and two keys; slots at 0, 2, 4."""
    plain, family = build(small_config("DR+DA", **SMALL)), build(BOTH)
    flops, fewer = analytic.matmul_flops(plain, 9), analytic.matmul_flops(family, 9)
    assert fewer["SA"] == pytest.approx(flops["SA"] * 3 / 5)
    each = 2 * 2 * 2 * 8  # of a key, for two heads
    assert fewer["DA"] == pytest.approx((flops["DA"] / 5 - 3 * each + 1.5 * each) * 2)
    caches = memory.caches(plain, 9), memory.caches(family, 9)
    assert (
        caches[1]["SA cache"] == caches[0]["SA cache"] * 3 / 5
        and caches[1]["DA cache"] == caches[0]["DA cache"] * 2 / 5
    )
    assert analytic.parameters(plain) == analytic.parameters(family)
    always, slots = (build(dataclasses.replace(SLOTS, pa_every=every)) for every in (1, 2))
    flops, fewer = analytic.matmul_flops(always, 9), analytic.matmul_flops(slots, 9)
    assert fewer == {**flops, "PA": flops["PA"] * 3 / 5}
    assert analytic.parameters(always) == analytic.parameters(slots)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"variant": "LA+DA", "da_every": 2}, "model.da_every: 2 is for DR and DR+DA; LA+DA has layers of its own"),
        ({"variant": "DR", "da_every": 2}, "model.da_every: 2 is for depth attention; DR has none"),
        (
            {"variant": "LA", "pa_slots": 2, "pa_every": 2},
            "model.pa_every: 2 is for DR and DR+DA; LA has layers of its",
        ),
        ({"pa_every": 2}, "model.pa_every: 2 is for parameter attention; set model.pa_slots too"),
        ({"pa_slots": 2, "pa_every": 5}, "model.pa_every: 5 leaves depth 0 alone at model.depth 5"),
        ({"sa_every": 0}, "model.sa_every: 0 is too small"),
        ({"sa_every": 5}, "model.sa_every: 5 leaves depth 0 alone at model.depth 5"),
        (
            {"da_every": 2, "da_dilation": 3},
            "model.da_dilation: 3 leaves no earlier depth to see at model.depth 5 with",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, line):
    with pytest.raises(ConfigError) as caught:
        small_config(**{"variant": "DR+DA", **SMALL, **changes})
    assert str(caught.value).startswith(line)


def test_a_summary_says_so():
    assert BOTH.summary.endswith("sequence attention at one depth in 2, depth attention at one depth in 3")
    assert SLOTS.summary.endswith("3 learned slots, parameter attention at one depth in 2")
