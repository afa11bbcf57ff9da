"""The depth-attention kernels against the definition: all depths of a scan, values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend, tiles
from pallas_kernels.depth_attention import WHOLE, DepthAttention, DepthCache, empty_cache, reference, xla
from pallas_kernels.depth_attention.shapes import Blocks, unsupported, whole_vmem
from tests.pallas_kernels.compiling import KINDS, compiling_for
from tests.pallas_kernels.interpreting import on_two_cores

KERNEL = DepthAttention("pallas")
FLOAT32 = 1e-5  # of the largest element
BFLOAT16 = 2.0**-7  # two roundings of it
SMALL = tiles.Generation("small", cores=2, vmem=1 << 40, depth_forward=(128, 128), depth_backward=(128, 128))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that every edge between them is met at sizes that are quick to interpret."""
    monkeypatch.setattr("pallas_kernels.depth_attention.layout.INTERPRETED", SMALL)


def inputs(slots, tokens, heads, kv_heads, size, dtype, seed=0):
    """q, k, v and d_out of all depths."""
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    return tuple(jnp.asarray(rng.normal(size=(slots, tokens, n, size)), dtype) for n in counts)


def defined(q, k, v, d_out, window=WHOLE):
    """Outputs, and gradients of q, k and v, by plain autodiff through all depths; float32."""
    q, k, v, d_out = (part.astype(jnp.float32) for part in (q, k, v, d_out))
    slots, tokens, kv_heads, size = k.shape

    def run(q, k, v):
        cache, outs = empty_cache(slots, tokens, kv_heads, size, q.dtype), []
        for depth in range(slots):
            out, cache = reference.depth_attention(q[depth], k[depth], v[depth], cache, jnp.int32(depth), window)
            outs.append(out)
        return jnp.stack(outs)

    out, vjp = jax.vjp(run, q, k, v)
    return out, *vjp(d_out)


def scanned(q, k, v, d_out, unwritten=0.0, window=WHOLE):
    """The same as the depth scan does it: forward through the cache, then down the depths with a tape."""
    slots, tokens, kv_heads, size = k.shape
    cache = jax.tree.map(lambda part: part + unwritten, empty_cache(slots, tokens, kv_heads, size, q.dtype))

    @jax.jit
    def forward(q, k, v, cache, depth):
        return KERNEL(q, k, v, cache, depth, window=window)

    @jax.jit
    def backward(q, k, v, cache, depth, tape, d_out):
        attend = lambda q, k, v, tape: KERNEL(q, k, v, cache, depth, tape, window)[0]  # noqa: E731
        return jax.vjp(attend, q, k, v, tape)[1](d_out)

    outs = []
    for depth in range(slots):
        out, cache = forward(q[depth], k[depth], v[depth], cache, jnp.int32(depth))
        outs.append(out)
    np.testing.assert_array_equal(cache.keys.reshape(k.shape), k)
    np.testing.assert_array_equal(cache.values.reshape(v.shape), v)
    tape = KERNEL.start_tape(cache, q.shape[2], size, window)
    tape = jax.tree.map(lambda part: part + jnp.asarray(unwritten, part.dtype), tape)
    gradients = []
    for depth in reversed(range(slots)):
        *gradient, tape = backward(q[depth], k[depth], v[depth], cache, jnp.int32(depth), tape, d_out[depth])
        gradients.append(gradient)
    # Beside other operations an interpreted kernel can wait for ever.
    outs, gradients = jax.block_until_ready((outs, gradients))
    return jnp.stack(outs), *(jnp.stack(parts[::-1]) for parts in zip(*gradients, strict=True))


def assert_close(actual, expected, tolerance):
    """Every output and gradient, to a share of its largest element."""
    for name, got, want in zip(("out", "d_q", "d_k", "d_v"), actual, expected, strict=True):
        assert got.shape == want.shape
        largest = float(jnp.abs(want).max())
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=tolerance * largest, err_msg=name)


# Slots that blocks of 4 divide or not, one and several blocks of 128 tokens; one head, groups, several key heads.
SHAPES = [(1, 128, 1, 1, 128), (5, 256, 1, 1, 128), (8, 128, 2, 1, 128), (6, 128, 4, 2, 128), (4, 384, 1, 1, 64)]


@pytest.mark.slow_but("(6, 128, 4, 2, 128)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_the_definition(shape):
    """Float32, from depth 0 to L-1; slots that no depth has written yet hold NaN and are never read."""
    arguments = inputs(*shape, jnp.float32)
    assert_close(scanned(*arguments, unwritten=jnp.nan), defined(*arguments), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 256, 1, 1, 128), (5, 128, 4, 2, 128)])
def test_two_cores_do_not_race(shape):
    """As a TPU would run it; uninitialised memory is NaN too."""
    arguments = inputs(*shape, jnp.float32)
    actual = on_two_cores(functools.partial(scanned, unwritten=jnp.nan), *arguments)
    assert_close(actual, defined(*arguments), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("size", [128, 64])
def test_several_rows_of_a_block(monkeypatch, size):
    """Forward and backward with blocks of their own, of which the inner loop takes all tokens at once or a part."""
    large = dataclasses.replace(SMALL, depth_slots=2, depth_forward=(512, 256), depth_backward=(256, 128))
    monkeypatch.setattr("pallas_kernels.depth_attention.layout.INTERPRETED", large)
    arguments = inputs(3, 512, 1, 1, size, jnp.float32)
    assert_close(scanned(*arguments, unwritten=jnp.nan), defined(*arguments), FLOAT32)


@pytest.mark.parametrize("chip", tiles.GENERATIONS)
def test_blocks_are_always_full(chip):
    """Whatever the number of slots and of tokens: a multiple of 128 is all that is asked of the tokens."""
    target = tiles.GENERATIONS[chip]
    for slots in (1, 2, 7, 16, 30, 32):
        for tokens in (128, 384, 1152, 5 * 1024, 32768):
            rows = jax.ShapeDtypeStruct((slots, tokens, 128), jnp.bfloat16)
            for backward, (most, at_once) in enumerate((target.depth_forward, target.depth_backward)):
                blocks = Blocks.of(DepthCache(rows, rows), 1, target, bool(backward))  # type: ignore[arg-type]
                assert slots % blocks.slots == 0 and tokens % blocks.tokens == 0 and blocks.tokens % blocks.rows == 0
                assert blocks.slots <= target.depth_slots and blocks.tokens <= most and blocks.rows <= at_once


@pytest.mark.parametrize("chip", tiles.GENERATIONS)
def test_blocks_fit_the_memory_of_a_core(chip):
    """Many heads a key head: fewer tokens at once, then fewer slots, or the reason why no kernel takes them."""
    target = tiles.GENERATIONS[chip]
    for dtype in (jnp.bfloat16, jnp.float32):
        for group in (1, 2, 3, 4, 8, 16, 32, 200):
            rows = jax.ShapeDtypeStruct((8, 1024, 128), dtype)
            cache = DepthCache(rows, rows)  # type: ignore[arg-type]
            with compiling_for(KINDS[chip]):
                reason = unsupported((1024, group, 128), rows.dtype, cache)
            for backward in (False, True):
                blocks = Blocks.of(cache, group, target, backward)
                need = blocks.tokens * whole_vmem(cache, group, blocks.slots, backward)
                assert need <= target.vmem or reason, (dtype, group, blocks)
            assert not reason or group > 8, (dtype, group)  # all chips have room for so many


@pytest.mark.parametrize("shape", [(3, 128, 2, 1, 128), *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES)])
def test_kernels_in_bfloat16(shape):
    """To rounding; sums are float32, so the error doesn't grow with the depths."""
    arguments = inputs(*shape, jnp.bfloat16)
    actual = scanned(*arguments)
    assert all(part.dtype == jnp.bfloat16 for part in actual)
    assert_close(actual, defined(*arguments), BFLOAT16)


@pytest.mark.slow
@given(
    slots=st.integers(1, 10),
    blocks=st.integers(1, 3),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
def test_kernels_at_random_shapes(slots, blocks, group, kv_heads, seed):
    """Any number of slots, blocks of tokens, heads in a group and key heads."""
    arguments = inputs(slots, 128 * blocks, group * kv_heads, kv_heads, 128, jnp.float32, seed)
    assert_close(scanned(*arguments), defined(*arguments), FLOAT32)


@pytest.mark.slow
def test_more_statistics_than_a_register_has_rows():
    """Those of six heads of a group take two registers."""
    arguments = inputs(12, 128, 6, 1, 128, jnp.float32)
    assert_close(scanned(*arguments), defined(*arguments), FLOAT32)


def test_gradient_without_a_tape():
    """Plain autodiff through the kernel, as remat none takes it: the cache gets a gradient too."""
    q, k, v, d_out = (part[2] for part in inputs(3, 128, 2, 1, 128, jnp.float32))
    rng = np.random.default_rng(1)
    cache = DepthCache(*(jnp.asarray(rng.normal(size=(5, 128, 128)), jnp.float32) for _ in range(2)))
    d_cache = DepthCache(*(jnp.asarray(rng.normal(size=(5, 128, 128)), jnp.float32) for _ in range(2)))

    def gradient(operation):
        return jax.vjp(lambda *a: operation(*a, jnp.int32(2)), q, k, v, cache)[1]((d_out, d_cache))

    actual = gradient(KERNEL)
    for got, want in zip(*map(jax.tree.leaves, (actual, gradient(reference.depth_attention))), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=FLOAT32 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("shape", [(3, 100, 1, 1, 128), (3, 128, 2, 1, 64)], ids=str)
def test_other_shapes_take_xla_and_say_so(shape, caplog):
    """One line that names the reason, however often; results are the definition's."""
    backend._say_once.cache_clear()
    arguments = inputs(*shape, jnp.float32)
    assert_close(scanned(*arguments), defined(*arguments), FLOAT32)
    lines = [record.message for record in caplog.records if record.name == "pallas_kernels"]
    assert len(lines) == 1 and str(shape[1] if shape[1] % 128 else shape[4]) in lines[0], lines


def test_xla_tape_holds_the_float32_gradient_of_the_cache():
    """In bfloat16 nothing is rounded between depths."""
    q, k, v, d_out = (part[0] for part in inputs(1, 8, 2, 1, 16, jnp.bfloat16))
    cache = DepthCache(*(part.reshape(1, 8, 16) for part in (k, v)))
    tape = xla.start_tape(cache)
    attend = functools.partial(xla.depth_attention, q, k, v, cache, jnp.int32(0))
    tape = jax.vjp(lambda tape: attend(tape)[0], tape)[1](d_out)[0]
    assert {part.dtype for part in jax.tree.leaves(tape)} == {jnp.dtype(jnp.float32)}
    wide = [part.astype(jnp.float32) for part in (q, k, v, d_out)]
    np.testing.assert_allclose(tape.values[0], wide[3].sum(1), rtol=1e-6)  # one slot: its weight is 1
