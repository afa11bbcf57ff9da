"""Depth attention over a window and with dilation, in the model: NumPy, plain autodiff, decoding, budgets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.collection import make_observer
from dreamer_jax.blocks.counting import Reach
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from dreamer_jax.parallel import make_mesh
from pallas_kernels.depth_attention import Ring
from tests.analysis.brute_force import statistics
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
SMALL: dict[str, Any] = {"depth": 5, "da_heads": 2, "da_kv_heads": 1, "hidden_size": 12, "num_experts": 4}
BOTH = small_config("DR+DA", **SMALL, da_window=2, da_dilation=2)


def full_pass(config, depth=None):
    return jitted_forward(config)(*random_weights(config), random_tokens(config), *PACKED, depth or config.depth)


@pytest.mark.slow_but("{'da_window': 2}", "'da_window': 2, 'da_dil")
@pytest.mark.parametrize("changes", [{"da_window": 2}, {"da_dilation": 2}, {"da_window": 2, "da_dilation": 2}], ids=str)
def test_equal_to_numpy(changes):
    """Packed rows, at the trained depth and a shallower one."""
    config = small_config("DR+DA", **SMALL, **changes)
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (5, 3):
        expected = forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > SAFE_MARGIN, "near tie: choose another seed"
        found = np.asarray(full_pass(config, depth).logits)[REAL]
        assert relative_error(found, expected.logits[REAL]) < TOLERANCE
    plain = np.asarray(full_pass(small_config("DR+DA", **SMALL)).logits)[REAL]
    assert relative_error(np.asarray(full_pass(config).logits)[REAL], plain) > 0.01


@functools.cache
def gradient(config, remat="full"):
    loss = functools.partial(model_loss, config=config, remat=remat)
    return jax.jit(jax.value_and_grad(loss))(*random_weights(config))


@pytest.mark.slow
def test_a_window_of_all_depths_changes_no_bit():
    """Of the loss and of every gradient."""
    plain, all_of_them = (small_config("DR+DA", **SMALL, da_window=window) for window in (0, 5))
    jax.tree.map(np.testing.assert_array_equal, gradient(all_of_them), gradient(plain))


@pytest.mark.slow  # tests/families/test_gradients.py has it of whole depths
@pytest.mark.parametrize("remat", ["attention", "full", "none"])
def test_gradients_are_those_of_an_unrolled_loop(remat):
    """By plain autodiff of the definition, which masks a cache of all depths."""
    assert_same(gradient(BOTH, remat), unrolled_gradient(BOTH))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"da_window": 3}, {"da_dilation": 3}, {"da_window": 1}], ids=str)
def test_gradients_of_other_windows(changes):
    config = small_config("LA+DA", **SMALL, **changes)
    if changes != {"da_window": 1}:  # of a single slot the weight is 1, and queries get no gradient
        assert_same(gradient(config), unrolled_gradient(config))
    loss, got = gradient(config)
    expected, wanted = unrolled_gradient(config)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max())), got, wanted)


@pytest.mark.slow_but("None")
@pytest.mark.parametrize("depth", [None, 7])
def test_decoding_keeps_the_newest_depths_only(depth):
    """A ring of 3 of 5 or 7 depths; every position at its own depth, against a full pass with all slots."""
    model, found = flying(BOTH, depth)
    kept = model.family.flight(2, 6, model.total_depth)
    assert isinstance(kept, Ring) and kept.keys.shape == (3, 12, 8)
    assert relative_error(found, passed_whole(BOTH, depth)) < TOLERANCE


def test_a_window_that_reaches_all_depths_keeps_them_without_a_ring():
    kept = build(small_config("DR+DA", **SMALL, da_window=3, da_dilation=2)).flight(1, 1, 5)
    assert not isinstance(kept, Ring) and kept.keys.shape[0] == 5
    assert build(BOTH).fresh(1, 1, 5).depths.keys.shape[0] == 5  # a backward pass asks for all


def test_budgets_count_the_slots_that_are_seen():
    """FLOPs by the mean of 1, 1, 2, 2, 2 slots; the cache of generation by 3 depths, the gradient's too."""
    plain, family = build(small_config("DR+DA", **SMALL)), build(BOTH)
    block = family.layer.depth_attention
    assert block.keys_met(Reach(9, 3, 5)) == 8 / 5 and plain.layer.depth_attention.keys_met(Reach(9, 3, 5)) == 3
    fewer = analytic.matmul_flops(plain, 9)["DA"] - analytic.matmul_flops(family, 9)["DA"]
    assert fewer == pytest.approx(5 * 2 * 2 * (3 - 8 / 5) * 2 * 8)
    assert memory.caches(plain, 9)["DA cache"] == 5 * 16 * 2 and memory.caches(family, 9)["DA cache"] == 3 * 16 * 2
    assert block.flight_read(Reach(9, 3, 5)) == 8 / 5 * 16
    activations = [memory.activations(its, 9, 1, "full") for its in (plain, family)]
    assert activations[0] - activations[1] == 9 * 16 * 2 * 4  # float32 gradients of 2 depths fewer


@pytest.mark.parametrize("changes", [{"da_window": 2}, {"da_window": 2, "da_dilation": 2}, {"da_dilation": 3}], ids=str)
def test_the_program_has_the_products_that_are_counted(changes):
    config = small_config("DR+DA", **SMALL, **changes)
    assert program.count(config, 6) == program.expected(config, 6)
    fewer = (
        program.expected(small_config("DR+DA", **SMALL), 6).flops_per_token - program.count(config, 6).flops_per_token
    )
    slots = -(-5 // config.da_dilation)
    slots = min(slots, config.da_window) if config.da_window else slots
    assert fewer == 5 * 2 * 2 * (5 - slots) * 2 * 8


def test_analysis_looks_where_attention_does():
    """Depth scores against brute force: zero wherever a depth isn't seen."""
    params, bias = random_weights(BOTH)
    mask = SEGMENT_IDS > 0
    batch = {"tokens": random_tokens(BOTH), "targets": random_tokens(BOTH, 1), "segment_ids": SEGMENT_IDS}
    batch |= {"positions": POSITIONS, "loss_mask": mask, "answer_mask": mask}
    expected, margin = statistics(BOTH, params, bias, batch, mask)
    assert margin > SAFE_MARGIN
    mesh = make_mesh(MeshConfig(data=(1,)))
    scores = np.asarray(make_observer(BOTH, mesh)(params, {"balancing": bias}, batch)["depth_scores"])  # [L, n, L]
    np.testing.assert_allclose(scores, expected["depth_scores"], atol=1e-4)
    seen = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1]], bool)
    assert ((scores > 0).all(axis=1) == seen).all() and ((scores > 0).any(axis=1) == seen).all()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"variant": "DR", "da_window": 2}, "model.da_window: 2 is for depth attention; DR has none"),
        ({"variant": "LA", "da_dilation": 2}, "model.da_dilation: 2 is for depth attention; LA has none"),
        ({"da_window": -1}, "model.da_window: -1 is too small"),
        ({"da_dilation": 0}, "model.da_dilation: 0 is too small"),
        ({"da_dilation": 5}, "model.da_dilation: 5 leaves no earlier depth to see at model.depth 5"),
        ({"da_dilation": 2, "da_window": 1}, "model.da_dilation: 2 has no meaning with model.da_window 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, line):
    with pytest.raises(ConfigError) as caught:
        small_config(**{"variant": "DR+DA", **SMALL, **changes})
    assert str(caught.value).startswith(line)


def test_a_summary_says_so():
    assert BOTH.summary.endswith(", depth attention over the newest 2 depths at steps of 2")
    assert small_config("DR+DA", da_dilation=2).depths_seen == "depth attention over depths at steps of 2"
    assert "depth attention over" not in small_config("DR+DA").summary
