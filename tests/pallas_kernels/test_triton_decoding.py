"""The kernels for NVIDIA GPUs that decoding has: interpreted here, and on a GPU (marker gpu) as they run there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.api as linear_api
import pallas_kernels.attention_moe.reference as linear_reference
import pallas_kernels.expert_mlp.api as mlp_api
import pallas_kernels.expert_mlp.reference as mlp_reference
from pallas_kernels.dispatch import few
from pallas_kernels.sequence_attention import slots, slots_triton
from pallas_kernels.weights import OutputColumns, OutputRows
from tests.pallas_kernels.test_triton import close, normal, on

F32 = jnp.float32

# Sides that tiles divide and don't, with a rest in the sums.
MLPS = on(
    [(5, 3, 6, 24, 48), (2, 2, 4, 16, 320)],
    [(1, 8, 537, 480, 1024), (16, 8, 32, 256, 512), (30, 4, 11, 472, 1016)],
)


@pytest.mark.slow_but("(5, 3")
@pytest.mark.parametrize(("dtype", "tokens", "choices", "experts", "size", "hidden"), MLPS)
def test_expert_mlp(dtype, tokens, choices, experts, size, hidden):
    """The definition; a pair without an expert (index E) adds nothing, whatever its weight; and the gradients."""
    rng = np.random.default_rng(0)
    indices = np.stack([rng.choice(experts, choices, replace=False) for _ in range(tokens)]).astype(np.int32)
    if tokens > 1:
        indices[1, 0] = experts
    indices = jnp.asarray(indices)
    floats = (
        normal(0, dtype, tokens, hidden),
        jnp.abs(normal(1, jnp.float32, tokens, choices)),
        normal(2, dtype, experts, 2 * size, hidden) * dtype(0.1),
        normal(3, dtype, experts, size, hidden) * dtype(0.1),
    )

    def defined(x, weights, gate_up, down):
        there = jnp.where(indices < experts, weights, 0)
        return mlp_reference.expert_mlp(x, jnp.minimum(indices, experts - 1), there, gate_up, down)

    wide = [part.astype(jnp.float32) for part in floats]
    expected, wanted_of = jax.vjp(defined, *wide)
    close(jax.jit(mlp_api._few)(floats[0], indices, *floats[1:]), expected, dtype)
    d_out = normal(4, dtype, tokens, hidden)
    _, vjp = jax.vjp(lambda x, *rest: mlp_api._few(x, indices, *rest), *floats)
    for got, want in zip(vjp(d_out), wanted_of(d_out.astype(jnp.float32)), strict=True):
        close(got, want, dtype)


LINEARS = on([(3, 4, 48, 40), (2, 3, 300, 16)], [(1, 12, 512, 1024), (16, 8, 1000, 392)])


@pytest.mark.slow_but("(3, 4")
@pytest.mark.parametrize(("dtype", "rows", "experts", "inward", "outward"), LINEARS)
def test_expert_linear(dtype, rows, experts, inward, outward):
    """Each row by its own matrix, zero without one; and the gradients."""
    index = jnp.asarray(np.random.default_rng(1).integers(0, experts, rows), jnp.int32)
    x, routed = normal(0, dtype, rows, inward), normal(1, dtype, experts, inward, outward) * dtype(0.3)
    ones = jnp.ones(rows, jnp.float32)

    def defined(x, routed):
        return linear_reference.expert_linear(x, index, ones, routed, jnp.zeros_like(routed[0]))

    expected, wanted_of = jax.vjp(defined, x.astype(jnp.float32), routed.astype(jnp.float32))
    close(jax.jit(linear_api._few)(x, index, routed), expected, dtype)
    alike = jnp.repeat(index[:1], rows)
    np.testing.assert_array_equal(few.product(x, index[:1], routed), few.product(x, alike, routed))
    nothing = few.product(x, jnp.full(rows, experts, jnp.int32), routed)
    assert not np.asarray(nothing, np.float32).any()
    d_out = normal(2, dtype, rows, outward)
    _, vjp = jax.vjp(lambda x, routed: linear_api._few(x, index, routed), x, routed)
    for got, want in zip(vjp(d_out), wanted_of(d_out.astype(jnp.float32)), strict=True):
        close(got, want, dtype)


INT8 = on([(3, 4, 24, 80), (2, 3, 16, 300)], [(16, 11, 472, 1024), (1, 537, 480, 1024)])


@pytest.mark.parametrize(("dtype", "rows", "experts", "size", "hidden"), INT8)
def test_whole_numbers_of_eight_bits(dtype, rows, experts, size, hidden):
    """The products with the matrices that the whole numbers stand for; a row without an expert is zero."""
    index = jnp.asarray(np.random.default_rng(1).integers(0, experts, rows), jnp.int32).at[0].set(experts)
    x, activation = normal(0, dtype, rows, hidden), normal(1, dtype, rows, size)
    gate_up = OutputRows.in_int8(normal(2, jnp.float32, experts, 2 * size, hidden))
    down = OutputColumns.in_int8(normal(3, jnp.float32, experts, size, hidden))
    there = (np.arange(rows) > 0)[:, None]
    own = np.minimum(index, experts - 1)
    wide = [np.asarray(part, np.float64) for part in (x, activation, gate_up.as_array(F32), down.as_array(F32))]
    gate, up = np.split(np.einsum("rh,rfh->rf", wide[0], wide[2][own]), 2, axis=1)
    found = jax.jit(few.swiglu)(x, index[:, None], gate_up)
    close(found, np.where(there, gate / (1 + np.exp(-gate)) * up, 0), dtype)
    found = jax.jit(few.product)(activation, index, down)
    close(found, np.where(there, np.einsum("rf,rfh->rh", wide[1], wide[3][own]), 0), dtype)


# Rows, slots, heads: one block and several, one program of a row and several, heads alone, in pairs and in threes.
SLOTS = on(
    [(3, 64, 4, 2, 16), (2, 48, 3, 1, 16), (2, 1536, 2, 2, 16)],
    [(2, 128, 16, 8, 128), (5, 4096, 8, 4, 64), (1, 2048, 3, 1, 128)],
)


@pytest.mark.slow_but("(3, 64", "(2, 1536")
@pytest.mark.parametrize(("dtype", "rows", "length", "heads", "kv_heads", "size"), SLOTS)
@pytest.mark.parametrize("paged", [False, True])
def test_attention_over_slots(dtype, rows, length, heads, kv_heads, size, paged):
    """The plain form, at one depth and at each row's own, at the first slot, the last and others; in pages too, some
    of which aren't there. What lies behind a position is never seen."""
    depths = 3
    cache = normal(0, dtype, 2, depths, rows, length, kv_heads, size)
    q = normal(1, dtype, rows, 1, heads, size)
    positions = jnp.asarray(np.linspace(0, length - 1, rows).astype(np.int32)[::-1, None])
    keys, values, table = cache[0], cache[1], None
    if paged:
        page = 16
        order = np.random.default_rng(2).permutation(rows * length // page)
        table = jnp.asarray(order.reshape(rows, -1), jnp.int32)
        keys, values = (jnp.zeros_like(c).reshape(depths, -1, page, kv_heads, size) for c in (keys, values))
        keys, values = (
            to.at[:, table].set(of.reshape(depths, rows, -1, page, kv_heads, size))
            for to, of in zip((keys, values), cache, strict=True)
        )
        behind = jnp.arange(length // page)[None] * page > positions
        table = jnp.where(behind, keys.shape[1], table)
    for depth in (jnp.int32(1), jnp.arange(rows, dtype=jnp.int32)[:, None] % depths):
        wide = (part.astype(jnp.float32) for part in (q, cache[0], cache[1]))
        expected = slots.sequence_attention(*wide, depth, positions)
        arguments = q, keys, values, depth, positions, table
        assert slots_triton.unsupported(q.shape, keys, depth) is None
        close(jax.jit(slots_triton.attention)(*arguments), expected, dtype)


def test_what_is_few():
    """A step of decoding at the paper's sizes is, up to some rows with the same experts; a prompt isn't."""
    paper, layered = (jax.ShapeDtypeStruct((experts, 1024, 1024), jnp.bfloat16) for experts in (537, 32))
    assert few.few(8, paper) and few.few(16 * 8, paper)
    assert few.few(8, layered) and not few.few(16 * 8, layered)
    stack = jax.ShapeDtypeStruct((16 * 32, 1024, 1024), jnp.bfloat16)  # of 16 layers, one of which is meant
    assert few.few(16 * 8, stack) and not few.few(16 * 8, stack, among=32)
    assert not few.few(64 * 128, paper)


def test_what_the_attention_does_not_take():
    """Each reason by its name."""
    keys, depth = jnp.zeros((2, 1, 64, 2, 32)), jnp.int32(0)
    assert slots_triton.unsupported((1, 1, 4, 32), keys, depth) is None
    several = "it has one position a row, at one depth"
    assert slots_triton.unsupported((1, 2, 4, 32), keys, depth) == several
    assert slots_triton.unsupported((1, 1, 4, 32), keys, jnp.zeros((1, 1, 64), jnp.int32)) == several
    assert slots_triton.unsupported((1, 1, 18, 32), keys, depth) == "more than 8 of 18 heads share a key"
    assert slots_triton.unsupported((1, 1, 4, 48), keys[..., :1], depth) == (
        "a head size of 48 isn't a power of two from 16 to 256"
    )
    assert slots_triton.unsupported((1, 1, 4, 32), keys[:, :, :40], depth) == "40 slots are no multiple of 16"
