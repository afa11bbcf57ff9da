"""Compiled memory of the gradient: linear in depth, and depth attention adds little to it."""

import functools
import importlib

import jax
import jax.numpy as jnp
import pytest

from dreamer_jax.blocks.positions import Depth
from dreamer_jax.families import build, initialise
from dreamer_jax.recurrence import Scanned
from tests.families.cases import apply, small_config

FORWARD = importlib.import_module("dreamer_jax.families.forward")  # by its name there is the function in it
BATCH, SEQUENCE = 32, 64
HIDDEN = 64
STATE = BATCH * SEQUENCE * HIDDEN * 4  # bytes of one depth's residual stream: the least that has to be kept
LARGEST_RATIO = 1.5
STEADY = 1.25  # the largest growth per depth over the smallest
LARGEST_GROWTH = 3 * STATE  # bytes a depth: states, cache, its gradient in float32, and a depth's projection experts


def measure(variant, depth, scan=None):
    """Bytes of temporary memory of the compiled gradient; the paper's proportion of DA head to hidden size, 1/8."""
    config = small_config(
        variant,
        depth=depth,
        hidden_size=HIDDEN,
        sa_heads=2,
        sa_kv_heads=1,
        sa_head_size=16,
        da_heads=1,
        da_kv_heads=1,
        expert_size=16,
    )

    def loss(params, bias, tokens):
        return apply(config, params, bias["balancing"], tokens).logits.mean()

    shapes = jax.eval_shape(lambda: initialise(build(config), jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        if scan is not None:
            patch.setattr(FORWARD, "DepthScan", scan)
        compiled = jax.jit(jax.grad(loss)).lower(*shapes, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def checkpointed_scan(step, *_):
    """What one would write first: lax.scan over a checkpointed step, the memory in the carry, plain autodiff."""

    def scan(weights, state, inputs, memory, context, depth, *_):
        @jax.checkpoint
        def body(carry, l):
            stepped = step(weights.at(l), carry[0], inputs, Depth(l, jnp.int32(depth)), carry[1], context)
            return (stepped.state, stepped.memory), stepped.counts

        (state, _), counts = jax.lax.scan(body, (state, memory), jnp.arange(depth))
        return Scanned(state, (), counts, memory)

    return scan


@functools.cache
def temporary(variant, depth, naive=False):
    """Bytes, compiled once for all tests."""
    return measure(variant, depth, checkpointed_scan if naive else None)


def growth(depths, naive=False):
    """Bytes a depth adds, between each two neighbours of `depths`."""
    sizes = [temporary("DR+DA", depth, naive) for depth in depths]
    return [(b - a) / (m - n) for n, m, a, b in zip(depths, depths[1:], sizes, sizes[1:], strict=False)]


@pytest.mark.slow
def test_depth_attention_costs_little_memory():
    """At L = 32; and the states of all depths are a good part of it, so that the ratio means something."""
    plain = temporary("DR", 32)
    assert plain < 3 * 32 * STATE
    assert temporary("DR+DA", 32) <= LARGEST_RATIO * plain


@pytest.mark.slow  # tests/recurrence/test_scan.py has it of a small layer
def test_memory_is_linear_in_depth():
    """From L = 8 to 64 every depth adds the same, a few times its residual stream."""
    per_depth = growth((8, 16, 32, 64))
    assert max(per_depth) <= STEADY * min(per_depth), per_depth
    assert min(per_depth) >= STATE and max(per_depth) <= LARGEST_GROWTH, [b / STATE for b in per_depth]


@pytest.mark.slow
def test_these_bounds_refuse_the_plain_scan():
    """A checkpointed scan saves the cache at every depth: both bounds must notice."""
    assert growth((16, 32), naive=True)[0] > LARGEST_GROWTH
    assert temporary("DR+DA", 32, naive=True) > LARGEST_RATIO * temporary("DR", 32)
