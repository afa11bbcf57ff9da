"""The model's logits and counts against the NumPy reference, for every variant and mixing order."""

import jax
import numpy as np
import pytest

from dreamer_jax.errors import UserError
from tests.families.cases import (
    MIXINGS,
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    VARIANTS,
    apply,
    jitted_forward,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward

TOLERANCE = 1e-5  # of the largest logit, float32 against float64
SAFE_MARGIN = 5e-6  # a selection this far from a tie can't be flipped by float32's rounding


def assert_agrees(output, expected):
    """Logits of real tokens to TOLERANCE, counts exactly."""
    assert expected.margin > SAFE_MARGIN, "near tie: choose another seed"
    assert set(output.counts) == set(expected.counts)
    for name, counts in expected.counts.items():
        depth = len(counts)
        np.testing.assert_array_equal(output.counts[name][:depth], counts, err_msg=name)
        assert not np.any(output.counts[name][depth:]), name
    assert output.logits.dtype == np.float32
    assert relative_error(np.asarray(output.logits)[REAL], expected.logits[REAL]) < TOLERANCE


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_specification(variant, mixing):
    """Packed rows, grouped queries, several depth-attention heads; every run-time depth up to the trained one."""
    config = small_config(variant, mixing)
    params, bias = random_weights(config)
    batch = (random_tokens(config), SEGMENT_IDS, POSITIONS)
    seen = []
    for depth in (1, 2, 3):
        output = jitted_forward(config)(params, bias, *batch, depth)
        assert_agrees(output, forward(config, params, bias, *batch, depth=depth))
        seen.append(np.asarray(output.logits)[REAL])
    assert relative_error(seen[0], seen[1]) > 0.1 and relative_error(seen[1], seen[2]) > 0.1  # depth matters


@pytest.mark.slow_but("DR+DA-5-full", "LA-2", "DR-5-none")
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize(("variant", "depth"), [("LA", 2), ("LA", None), ("DR", 5), ("DR+DA", 5), ("DR+DA", None)])
def test_static_depth(variant, depth, remat):
    """Another L than the trained one: deeper in DR, with as many projection experts as it was trained with."""
    config = small_config(variant)
    params, bias = random_weights(config)
    batch = (random_tokens(config), SEGMENT_IDS, POSITIONS)
    output = jax.jit(lambda params, bias: apply(config, params, bias, *batch, depth, remat))(params, bias)
    assert all(len(counts) == (depth or config.depth) for counts in output.counts.values())
    assert_agrees(output, forward(config, params, bias, *batch, depth=depth))


def test_layers_that_do_not_exist():
    """LA can't go deeper than it has layers, and says so."""
    config = small_config("LA")
    params, bias = random_weights(config)
    with pytest.raises(UserError, match="3 layers"):
        apply(config, params, bias, random_tokens(config), depth=4)


def test_defaults_of_segments_and_positions():
    """Without segment ids and positions every row is one document from position 0."""
    config = small_config()
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    ones = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    output = jitted_forward(config)(params, bias, tokens, None, None, 3)
    expected = forward(config, params, bias, tokens, ones, positions)
    assert expected.margin > SAFE_MARGIN
    assert relative_error(output.logits, expected.logits) < TOLERANCE
    assert sum(int(c.sum()) for c in output.counts.values()) == tokens.size * 3 * (2 + 1 + 1)


def test_margins_are_what_the_bias_decides():
    """The reference itself: the bias changes selections (or the tests above would not see it)."""
    config = small_config()
    params, bias = random_weights(config)
    batch = (random_tokens(config), SEGMENT_IDS, POSITIONS)
    without = forward(config, params, {name: np.zeros_like(b) for name, b in bias.items()}, *batch)
    with_bias = forward(config, params, bias, *batch)
    for name, counts in with_bias.counts.items():
        assert np.any(counts != without.counts[name]), name
