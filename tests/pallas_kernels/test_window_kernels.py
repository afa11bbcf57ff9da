"""The depth-attention kernels over windows and with dilation, against the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.extend.core import jaxprs_in_params

from pallas_kernels import tiles
from pallas_kernels.depth_attention import DepthCache, Ring, Window, api, empty_cache, reference
from pallas_kernels.depth_attention.pull import Queries
from pallas_kernels.depth_attention.shapes import near_blocks, near_vmem, spilled_vmem, unsupported
from tests.pallas_kernels.compiling import KINDS, compiling_for
from tests.pallas_kernels.interpreting import on_two_cores
from tests.pallas_kernels.test_depth_attention import (
    BFLOAT16,
    FLOAT32,
    KERNEL,
    SMALL,
    assert_close,
    defined,
    inputs,
    scanned,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of tokens, and of slots, at sizes that are quick to interpret."""
    monkeypatch.setattr("pallas_kernels.depth_attention.layout.INTERPRETED", SMALL)


@pytest.fixture
def only_kernels(monkeypatch):
    """Where XLA computed instead, nothing would be tested."""

    def fail(*arguments):
        raise AssertionError("the kernel wasn't taken")

    monkeypatch.setattr(api, "_by_xla", fail)


SLOW = pytest.mark.slow
CASES = [
    # every number of slots below and above; two blocks of tokens
    pytest.param((7, 256, 1, 1, 128), Window(3, 2), marks=SLOW),
    ((6, 128, 4, 2, 128), Window(2)),  # groups, several key heads
    pytest.param((5, 384, 1, 1, 64), Window(0, 2), marks=SLOW),  # dilation alone; a small head; an odd number of blocks
    # more slots than are worked on at once, and a rest of them
    pytest.param((8, 128, 1, 1, 128), Window(7), marks=SLOW),
    pytest.param((3, 128, 2, 1, 128), Window(1), marks=SLOW),  # only itself
]


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize(("shape", "window"), CASES, ids=str)
def test_kernels_compute_the_definition(shape, window):
    """Values and gradients of all depths; slots that no depth has written yet hold NaN and are never read."""
    arguments = inputs(*shape, dtype=jnp.float32)
    actual = scanned(*arguments, unwritten=np.nan, window=window)
    assert_close(actual, defined(*arguments, window=window), FLOAT32)


@pytest.mark.slow
@pytest.mark.usefixtures("only_kernels")
@given(
    slots=st.integers(1, 9),
    size=st.integers(0, 6),
    dilation=st.integers(1, 4),
    group=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None)
def test_any_window(slots, size, dilation, group, kv_heads, seed):
    """Windows of every size, also of all depths, and dilations beyond the pass."""
    arguments, window = inputs(slots, 128, group * kv_heads, kv_heads, 128, jnp.float32, seed), Window(size, dilation)
    assert_close(scanned(*arguments, unwritten=np.nan, window=window), defined(*arguments, window=window), FLOAT32)


@SLOW
@pytest.mark.usefixtures("only_kernels")
def test_two_cores_do_not_race():
    """As a TPU would run it, each with a block of tokens after another; uninitialised memory is NaN too."""
    arguments, window = inputs(4, 512, 1, 1, 128, jnp.float32), Window(2, 2)
    actual = on_two_cores(functools.partial(scanned, unwritten=np.nan, window=window), *arguments)
    assert_close(actual, defined(*arguments, window=window), FLOAT32)


@pytest.mark.slow
@pytest.mark.usefixtures("only_kernels")
def test_several_rows_of_a_block_in_bfloat16(monkeypatch):
    """Forward and backward with blocks of their own, of which the inner loop takes a part at a time; to rounding."""
    large = dataclasses.replace(SMALL, depth_slots=2, depth_forward=(512, 256), depth_backward=(256, 128))
    monkeypatch.setattr("pallas_kernels.depth_attention.layout.INTERPRETED", large)
    arguments, window = inputs(5, 512, 1, 1, 128, jnp.bfloat16), Window(4)
    actual = scanned(*arguments, unwritten=0.0, window=window)
    assert all(part.dtype == jnp.bfloat16 for part in actual)
    assert_close(actual, defined(*arguments, window=window), BFLOAT16)


@pytest.mark.usefixtures("only_kernels")
def test_only_seen_slots_are_fetched(monkeypatch):
    """Keys and values of as many slots as a depth sees beside itself, once for each block of tokens."""
    fetched, start = [], interpreter.dma_start

    def counted(*arguments, **named):
        fetched.append(1)
        return start(*arguments, **named)

    monkeypatch.setattr(interpreter, "dma_start", counted)
    q, k, v, _ = (part[0] for part in inputs(1, 256, 1, 1, 128, jnp.float32))
    cache, window = empty_cache(12, 256, 1, 128, "float32"), Window(3, 2)
    attend = jax.jit(lambda depth: KERNEL(q, k, v, cache, depth, window=window))
    for depth, seen in ((0, 0), (1, 0), (2, 1), (5, 2), (11, 2)):
        fetched.clear()
        jax.block_until_ready(attend(jnp.int32(depth)))
        assert len(fetched) == 2 * 2 * seen, depth  # keys and values, two blocks


@pytest.mark.usefixtures("only_kernels")
def test_a_ring_of_the_newest_depths():
    """As generation keeps them: the same as with a cache of all depths."""
    q, k, v, _ = inputs(8, 128, 2, 1, 128, jnp.float32)
    window = Window(3, 2)
    ring = Ring(*(part + jnp.nan for part in empty_cache(window.span(8), 128, 1, 128, "float32")))
    cache = empty_cache(8, 128, 1, 128, "float32")
    attend = jax.jit(lambda q, k, v, ring, depth: KERNEL(q, k, v, ring, depth, window=window))
    for depth in range(8):
        out, ring = attend(q[depth], k[depth], v[depth], ring, jnp.int32(depth))
        want, cache = reference.depth_attention(q[depth], k[depth], v[depth], cache, jnp.int32(depth), window)
        assert isinstance(ring, Ring)
        np.testing.assert_allclose(out, want, rtol=0, atol=FLOAT32 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("window", [Window(5), Window(9), Window(0, 1)], ids=str)
def test_a_window_of_all_depths_is_the_plain_kernel(window):
    """To the operation, forward and backward."""
    q, k, v, d_out = (part[0] for part in inputs(1, 128, 1, 1, 128, jnp.float32))
    cache = empty_cache(5, 128, 1, 128, "float32")

    def traced(window):
        tape = KERNEL.start_tape(cache, 1, 128, window)

        def step(q, k, v, tape, depth):
            attend = lambda q, k, v, tape: KERNEL(q, k, v, cache, depth, tape, window)[0]  # noqa: E731
            return jax.vjp(attend, q, k, v, tape)[1](d_out)

        return jax.make_jaxpr(step)(q, k, v, tape, jnp.int32(2))

    names = [equation.params["name"] for equation in _kernels(traced(window).jaxpr)]
    assert names == [equation.params["name"] for equation in _kernels(traced(Window()).jaxpr)]
    assert names == ["depth_attention_recompute", "depth_attention_backward"]
    assert [e.params["name"] for e in _kernels(traced(Window(4)).jaxpr)] == [
        "depth_window_recompute",
        "depth_window_backward",
    ]


def _kernels(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _kernels(inner)


@pytest.mark.slow
def test_gradient_without_a_tape():
    """Plain autodiff through the kernel, as remat none takes it: the cache gets a gradient too."""
    q, k, v, d_out = (part[2] for part in inputs(3, 128, 2, 1, 128, jnp.float32))
    rng, window = np.random.default_rng(1), Window(2, 2)
    cache, d_cache = (
        DepthCache(*(jnp.asarray(rng.normal(size=(5, 128, 128)), jnp.float32) for _ in range(2))) for _ in range(2)
    )

    def gradient(operation):
        attend = lambda *a: operation(*a, jnp.int32(4), window=window)  # noqa: E731
        return jax.vjp(attend, q, k, v, cache)[1]((d_out, d_cache))

    for got, want in zip(*map(jax.tree.leaves, (gradient(KERNEL), gradient(reference.depth_attention))), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=FLOAT32 * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_a_shorter_pass_leaves_zeros_on_the_tape():
    """A pass that begins at depth 2 of a cache of 6 finds nothing above it: what isn't there adds nothing."""
    short, window = inputs(3, 128, 1, 1, 128, jnp.float32), Window(2, 2)
    cache = DepthCache(*(jnp.pad(part.reshape(3, 128, 128), ((0, 3), (0, 0), (0, 0))) for part in short[1:3]))
    tape = KERNEL.start_tape(cache, 1, 128, window)
    assert isinstance(tape, Queries) and tape.queries.shape[0] == window.span(6) == 3
    gradients = []
    for depth in (2, 1, 0):
        q, k, v, d_out = (part[depth] for part in short)
        attend = lambda q, k, v, tape, depth=depth: KERNEL(q, k, v, cache, jnp.int32(depth), tape, window)[0]  # noqa: E731
        *gradient, tape = jax.vjp(attend, q, k, v, tape)[1](d_out)
        gradients.insert(0, gradient)
    for got, want in zip(zip(*gradients, strict=True), defined(*short, window=window)[1:], strict=True):
        np.testing.assert_allclose(jnp.stack(got), want, rtol=0, atol=FLOAT32 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("chip", tiles.GENERATIONS)
def test_blocks_fit_the_memory_of_a_core(chip):
    """Whatever the window: as many tokens as its slots leave room for, or the reason why no kernel takes it."""
    target = tiles.GENERATIONS[chip]
    for slots, window in ((16, Window(4)), (32, Window(0, 2)), (32, Window(31)), (5, Window(1)), (64, Window(60))):
        for group in (1, 2, 8):
            rows = jax.ShapeDtypeStruct((slots, 32768, 128), jnp.bfloat16)
            cache = DepthCache(rows, rows)  # type: ignore[arg-type]
            with compiling_for(KINDS[chip]):
                reason = unsupported((32768, group, 128), rows.dtype, cache, window)
            for backward in (False, True):
                blocks = near_blocks(cache, group, window, target, backward)
                spilled = blocks.rows * spilled_vmem(group, blocks.slots) if backward else 0
                fits = blocks.tokens * near_vmem(cache, group, window, backward) + spilled <= target.vmem
                assert fits or (reason and backward), (slots, window, group)
                assert 32768 % blocks.tokens == 0 and blocks.tokens % blocks.rows == 0
                assert 1 <= blocks.slots <= target.depth_slots
