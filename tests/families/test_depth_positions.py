"""How depths are told apart, also those deeper than trained: NumPy, and what the ways have in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.positions import Depth, DepthCode, rope
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from dreamer_jax.families.contract import Drawn, depth_of
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    apply,
    jitted_forward,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward
from tests.families.test_gradients import assert_same, static_depth_gradient, unrolled_gradient

WAYS: dict[str, dict[str, Any]] = {
    "interpolated": {"depth_scaling": "interpolated"},
    "up, ntk": {"depth_counters": "up", "depth_scaling": "ntk"},
    "ntk": {"depth_scaling": "ntk"},
    "up": {"depth_counters": "up"},
    "none": {"depth_counters": "none"},
    "learned": {"depth_counters": "learned"},
    "learned, interpolated": {"depth_counters": "learned", "depth_scaling": "interpolated"},
}
X = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)


@pytest.mark.parametrize(
    "way",
    [
        w if w in ("interpolated", "up, ntk", "learned, interpolated") else pytest.param(w, marks=pytest.mark.slow)
        for w in WAYS
    ],
)
def test_the_model_agrees_with_numpy(way):
    """At the trained depth, a shallower one and a deeper one: logits, and which experts are used."""
    config = small_config("DR+DA", **WAYS[way])
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    packed = tokens, SEGMENT_IDS, POSITIONS
    whole = jax.jit(lambda params, depth: apply(config, params, bias, *packed, Drawn(depth, 5)))
    for depth in (2, 3, 5):
        found = whole(params, jnp.int32(depth))
        expected = forward(config, params, bias, *packed, depth=depth)
        assert expected.margin > 5e-6, "near tie: choose another seed"
        for router, counts in expected.counts.items():
            np.testing.assert_array_equal(found.counts[router][:depth], counts, err_msg=router)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < 1e-5


def code(counters: Any, scaling: Any, trained: int = 5) -> DepthCode:
    return DepthCode(500.0, counters, scaling, trained)


@pytest.mark.parametrize("counters", ["both", "up"])
@pytest.mark.parametrize("scaling", ["none", "interpolated", "ntk"])
def test_up_to_the_trained_depth_nothing_is_scaled(counters, scaling):
    for l, total in ((0, 5), (3, 5), (1, 3), (0, 1)):
        found = code(counters, scaling)(X, depth_of(l, total))
        np.testing.assert_array_equal(found, code(counters, "none")(X, depth_of(l, total)))


@pytest.mark.parametrize("counters", ["both", "up"])
def test_interpolated_depths_lie_between_the_known_ones(counters):
    """With nine depths in place of five, every second is a known one, in either direction."""
    deeper = code(counters, "interpolated")
    for l in range(5):
        np.testing.assert_allclose(deeper(X, depth_of(2 * l, 9)), deeper(X, depth_of(l, 5)), atol=1e-6)


def test_ntk_slows_the_slowest_rotation_by_the_stretch_and_the_fastest_not_at_all():
    """Twice as deep: the first pair of a head turns as before, the last one half as far."""
    deep, known = (code("up", scaling)(X, depth_of(6, 9)) for scaling in ("ntk", "none"))
    halved = rope(jnp.asarray(X), jnp.float32(3.0), 500.0)
    pairs = lambda x, i: np.asarray(x)[:, [i, i + 8]]  # noqa: E731
    np.testing.assert_allclose(pairs(deep, 0), pairs(known, 0), atol=1e-6)
    np.testing.assert_allclose(pairs(deep, 7), pairs(halved, 7), atol=1e-6)
    between = [np.abs(pairs(deep, i) - pairs(known, i)).max() for i in (2, 4, 6)]
    assert min(between) > 1e-4


def test_positions_of_their_own_depths_are_told_theirs():
    """As in decoding, where each position is at a depth of its own, on its way to an L of its own."""
    index, total = np.array([0, 3, 7, 2, 8], np.int32), np.array([1, 5, 9, 12, 9], np.int32)
    for counters in ("both", "up"):
        for scaling in ("none", "interpolated", "ntk"):
            its = code(counters, scaling)
            found = its(X, Depth(jnp.asarray(index), jnp.asarray(total)))
            alone = [its(X[i], depth_of(index[i], total[i])) for i in range(5)]
            np.testing.assert_allclose(found, np.stack(alone), atol=1e-6)


def test_counting_up_a_pass_is_the_beginning_of_a_deeper_one():
    """Nobody is told L: states of two depths are the first of three, also in depth attention."""
    config = small_config("DR+DA", depth_counters="up")
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    two, three = (forward(config, params, bias, tokens, SEGMENT_IDS, POSITIONS, depth=d).counts for d in (2, 3))
    for router in two:
        np.testing.assert_array_equal(two[router], three[router][:2])


@pytest.mark.slow
def test_learned_depths_start_as_none_and_learn():
    """Zeros at first, so that the model is the one that is told nothing; every row of a table gets a gradient."""
    config, plain = (small_config("DR+DA", depth_counters=counters) for counters in ("learned", "none"))
    learning, bias = random_weights(config)
    tokens, packed = random_tokens(config), (SEGMENT_IDS, POSITIONS)
    fresh = jax.jit(build(config).init)(jax.random.key(0))[0]["layer"]
    assert not fresh["depth_attention"]["depth_signals"].value.any()
    tables = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(learning)
        if path[-1].key == "depth_signals"
    }
    assert len(tables) == 4 and all(len(table) == 3 for table in tables.values())  # DA and three routers
    without = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if path[-1].key == "depth_signals" else leaf, learning
    )
    kept = _without_tables(without)
    found = jitted_forward(config)(without, bias, tokens, *packed, 3).logits
    np.testing.assert_allclose(found, jitted_forward(plain)(kept, bias, tokens, *packed, 3).logits, atol=1e-5)
    loss, gradient = static_depth_gradient(config, "full")
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        if path[-1].key == "depth_signals":
            assert (jnp.abs(leaf).max(axis=1) > 0).all(), jax.tree_util.keystr(path)
    assert_same((loss, gradient), unrolled_gradient(config))


def _without_tables(tree: Any) -> Any:
    return {
        name: _without_tables(leaf) if isinstance(leaf, dict) else leaf
        for name, leaf in tree.items()
        if name != "depth_signals"
    }


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match=r"model.depth_scaling: ntk is about rotations"):
        small_config(depth_counters="learned", depth_scaling="ntk")
    with pytest.raises(ConfigError, match=r"model.depth_counters: learned is for DR and DR\+DA"):
        small_config("LA+DA", depth_counters="learned")
    with pytest.raises(ConfigError, match=r"model.depth_scaling: interpolated has no meaning where"):
        small_config(depth_counters="none", depth_scaling="interpolated")
    with pytest.raises(ConfigError, match=r"model.depth_scaling: ntk has no meaning where each counter"):
        small_config(depth_scaling="ntk", router_size=4)
    with pytest.raises(ConfigError, match=r"take a larger model.pa_head_size"):
        small_config(depth_scaling="ntk", pa_slots=4, pa_head_size=4)
    with pytest.raises(ConfigError, match=r"take a larger model.da_head_size"):
        small_config(depth_scaling="ntk", da_head_size=4)
    for unused in (
        {"variant": "LA", "da_head_size": 4},
        {"pa_head_size": 4},
        {"da_form": "gated_recurrent", "da_head_size": 4},
    ):
        small_config(depth_scaling="ntk", **unused)
