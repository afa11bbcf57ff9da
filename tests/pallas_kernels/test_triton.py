"""The kernels for NVIDIA GPUs against definitions: interpreted here, and on a GPU (marker gpu) as they run there."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.reference as linear_reference
import pallas_kernels.attention_moe.xla as linear
import pallas_kernels.expert_mlp.reference as mlp_reference
import pallas_kernels.expert_mlp.xla as mlp
from pallas_kernels import gpu
from pallas_kernels.attention_moe.tape import LinearTape
from pallas_kernels.depth_attention import DepthAttention, DepthCache, empty_cache, xla
from pallas_kernels.depth_attention import triton as over_depths
from pallas_kernels.depth_attention.window import WHOLE, Window
from pallas_kernels.dispatch import plan_dispatch, triton
from pallas_kernels.expert_mlp.tape import ExpertTape
from pallas_kernels.sequence_attention import reference as sequence_reference
from pallas_kernels.sequence_attention import triton as sequence
from tests.pallas_kernels.test_depth_attention import assert_close as attention_is_close
from tests.pallas_kernels.test_depth_attention import defined, inputs
from tests.pallas_kernels.test_sequence_attention import inputs as rows_of_documents
from tests.pallas_kernels.test_sequence_attention import value_and_gradients

FLOAT32, BFLOAT16 = 1e-5, 2.0**-6  # of the largest element; of bfloat16, four roundings
GPU = pytest.mark.gpu


def on(sizes, gpu_sizes):
    """Parameters (float32, sizes) for the interpreter, and (bfloat16, sizes) for a GPU."""
    here = [pytest.param(jnp.float32, *each, id=f"interpreted {each}") for each in sizes]
    return [*here, *(pytest.param(jnp.bfloat16, *each, id=f"gpu {each}", marks=GPU) for each in gpu_sizes)]


def normal(seed, dtype, *shape):
    """Standard normal numbers, exact in the dtype."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def choose(tokens, choices, experts):
    """[T, k] int32, different within a token; of the experts the first takes ever fewer tokens, the last none."""
    heat = np.append(np.linspace(0, 1, experts - 1), -9)
    drawn = np.random.default_rng(5).normal(size=(tokens, experts)) + heat
    return jnp.asarray(np.argsort(-drawn, axis=1)[:, :choices], jnp.int32)


def close(actual, expected, dtype):
    """To a share of the largest expected element."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    tolerance = FLOAT32 if dtype == jnp.float32 else BFLOAT16
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-30))


# Sides that tiles divide and don't, with a rest in the sum; a block smaller and larger than a tile; there the paper's.
PRODUCTS = on(
    [(40, 2, 6, 64, 80, 16), (33, 3, 5, 24, 136, 32), (300, 2, 3, 136, 16, 256)],
    [(300, 8, 11, 480, 1024, 128), (90, 8, 13, 472, 1024, 64), (300, 1, 4, 384, 1024, 256), (4, 8, 19, 944, 1024, 16)],
)


@pytest.mark.slow_but("(300, 2")
@pytest.mark.parametrize(("dtype", "tokens", "choices", "experts", "size", "hidden", "block"), PRODUCTS)
def test_products(dtype, tokens, choices, experts, size, hidden, block):
    """Each block by its expert's matrix, and each expert's sum of outer products, in float64; nothing else is written
    but zeros."""
    plan = plan_dispatch(choose(tokens, choices, experts), experts, block)
    number, used = plan.source.shape[0], int(plan.used_blocks)
    assert used < number
    weight, into = normal(1, dtype, experts, size, hidden), normal(2, jnp.float32, experts, size, hidden)
    real = (plan.source < tokens * choices)[..., None]
    left, right = normal(3, dtype, number, block, size) * real.astype(dtype), normal(4, dtype, number, block, hidden)
    rows, columns, matrices = (np.asarray(part, np.float64) for part in (left, right, weight))
    of_block = np.asarray(plan.block_expert)

    def up_to(used, products):
        return np.concatenate([products[:used], np.zeros_like(products[used:])])

    close(triton.up(right, weight, plan), up_to(used, columns @ matrices[of_block].transpose(0, 2, 1)), dtype)
    close(triton.down(left, weight, plan), up_to(used, rows @ matrices[of_block]), dtype)
    expected = np.zeros(weight.shape)
    np.add.at(expected, of_block[:used], rows[:used].transpose(0, 2, 1) @ columns[:used])
    assert not expected[-1].any()
    close(triton.outer(left, right, plan), expected, jnp.float32)
    total = jax.jit(triton.outer, donate_argnums=3)(left, right, plan, into.copy())
    close(total, np.asarray(into, np.float64) + expected, jnp.float32)
    np.testing.assert_array_equal(total[-1], into[-1])


def compared(ours, defined, floats, d_out, start):
    """Value and all gradients without a tape, checked; then the new tape, and what the gradients should be."""
    dtype = floats[0].dtype
    value, vjp = jax.vjp(jax.jit(ours), *floats)
    expected, wanted_of = jax.vjp(defined, *(part.astype(jnp.float32) for part in floats))
    wanted = wanted_of(d_out.astype(jnp.float32))
    close(value, expected, dtype)
    for got, want in zip(vjp(d_out), wanted, strict=True):
        close(got, want, dtype)
    return jax.vjp(lambda tape: jax.jit(ours)(*floats, tape=tape), start)[1](d_out)[0], wanted


MLPS = on([(40, 3, 6, 24, 48)], [(300, 4, 9, 480, 1024), (16, 4, 11, 472, 1024)])


@pytest.mark.parametrize(("dtype", "tokens", "choices", "experts", "size", "hidden"), MLPS)
def test_expert_mlp(dtype, tokens, choices, experts, size, hidden):
    """The definition: the value and every gradient, those of the matrices also on a tape that has something already."""
    indices = choose(tokens, choices, experts)
    floats = (
        normal(0, dtype, tokens, hidden),
        jnp.abs(normal(1, jnp.float32, tokens, choices)),
        normal(2, dtype, experts, 2 * size, hidden) * dtype(0.1),
        normal(3, dtype, experts, size, hidden) * dtype(0.1),
    )
    d_out = normal(4, dtype, tokens, hidden)

    def ours(*floats, tape=None):
        return mlp.expert_mlp(floats[0], indices, *floats[1:], tape, triton.TRITON)

    def defined(x, *rest):
        return mlp_reference.expert_mlp(x, indices, *rest)

    start = jax.tree.map(lambda leaf: leaf + 1, ExpertTape.of_totals((experts, 2 * size, hidden)))
    tape, wanted = compared(ours, defined, floats, d_out, start)
    close(tape.gate_up - 1, wanted[2], dtype)
    close(tape.down - 1, wanted[3], dtype)


LINEARS = on([(70, 4, 48, 40)], [(900, 8, 1024, 384), (500, 3, 512, 4096), (8, 5, 2048, 1024)])


@pytest.mark.parametrize(("dtype", "tokens", "experts", "inward", "outward"), LINEARS)
def test_expert_linear(dtype, tokens, experts, inward, outward):
    """The same of the attention MoE's map."""
    index = choose(tokens, 1, experts)[:, 0]
    shapes = (tokens, inward), (experts, inward, outward), (inward, outward)
    x, routed, shared = (normal(n, dtype, *its) * dtype(0.3 if n else 1) for n, its in enumerate(shapes))
    floats = x, jnp.abs(normal(3, jnp.float32, tokens)), routed, shared
    d_out = normal(4, dtype, tokens, outward)

    def ours(*floats, tape=None):
        return linear.expert_linear(floats[0], index, *floats[1:], tape, triton.TRITON)

    def defined(x, *rest):
        return linear_reference.expert_linear(x, index, *rest)

    tape, wanted = compared(ours, defined, floats, d_out, LinearTape(jnp.ones(routed.shape, jnp.float32)))
    close(tape.totals - 1, wanted[2], dtype)


# Tokens that programs share evenly and not; one head, groups of powers of two and not, several key heads.
ATTENTIONS = on(
    [(4, 64, 1, 1, 16), (3, 37, 4, 2, 8), (3, 40, 3, 1, 16), (2, 9, 2, 2, 32)],
    [(16, 1000, 1, 1, 128), (6, 512, 4, 2, 128), (5, 100, 3, 1, 64)],
)


@pytest.mark.slow_but("(3, 40, 3", "(2, 9, 2")
@pytest.mark.parametrize(("dtype", "slots", "tokens", "heads", "kv_heads", "size"), ATTENTIONS)
def test_depth_attention(dtype, slots, tokens, heads, kv_heads, size):
    """All depths of a scan against plain autodiff; slots that no depth has written hold NaN and are never read."""
    q, k, v, d_out = arguments = inputs(slots, tokens, heads, kv_heads, size, dtype)
    cache = jax.tree.map(lambda part: part + jnp.nan, empty_cache(slots, tokens, kv_heads, size, dtype))
    attend = jax.jit(over_depths.depth_attention)

    @jax.jit
    def backward(q, k, v, cache, depth, tape, d_out):
        return jax.vjp(
            lambda *floats: over_depths.depth_attention(*floats[:3], cache, depth, floats[3])[0], q, k, v, tape
        )[1](d_out)

    outs, gradients = [], []
    for depth in range(slots):
        out, cache = attend(q[depth], k[depth], v[depth], cache, jnp.int32(depth))
        outs.append(out)
    tape = xla.start_tape(cache)
    for depth in reversed(range(slots)):
        *gradient, tape = backward(q[depth], k[depth], v[depth], cache, jnp.int32(depth), tape, d_out[depth])
        gradients.append(gradient)
    actual = jnp.stack(outs), *(jnp.stack(parts[::-1]) for parts in zip(*gradients, strict=True))
    attention_is_close(actual, defined(*arguments), FLOAT32 if dtype == jnp.float32 else BFLOAT16)


SEQUENCES = on([(384, 2, 1, 16)], [(128, 2, 2, 128), (1024, 4, 2, 128), (1152, 3, 1, 64)])


@pytest.mark.parametrize(("dtype", "length", "heads", "kv_heads", "size"), SEQUENCES)
def test_sequence_attention(dtype, length, heads, kv_heads, size):
    """The definition, with documents that begin and end inside blocks, blocks of one alone, and padding last."""
    arrays, segment_ids = rows_of_documents(length, heads, kv_heads, size, dtype)
    wide = [part.astype(jnp.float32) for part in arrays]
    expected = value_and_gradients(sequence_reference.sequence_attention, wide, segment_ids)
    actual = value_and_gradients(sequence.sequence_attention, arrays, segment_ids)
    for got, want in zip(actual, expected, strict=True):
        close(got, want, dtype)


def test_blocks_without_a_document_in_common_are_not_walked():
    """By hand: 512 tokens, documents of 192, 64 and 256. No block is missed, or taken for one document, whose numbers
    come in any order."""
    segment_ids = jnp.repeat(jnp.asarray([5, 5, 5, 9, 2, 2, 2, 2], jnp.int32), 64)[None]
    np.testing.assert_array_equal(sequence._keys_walked(segment_ids), [[[0, 0, 4, 4]], [[0, 2, 4, 4]]])
    np.testing.assert_array_equal(sequence._queries_walked(segment_ids), [[[3, 4, 8, 8]], [[3, 4, 8, 8]]])
    drawn = np.random.default_rng(0).integers(0, 40, (3, 512)).cumsum(1) // 900  # runs, then mixed up
    mixed = jnp.asarray((drawn * 7) % 5, jnp.int32)
    first, alike_from = sequence._keys_walked(mixed)
    end, alike_to = sequence._queries_walked(mixed)
    for row, ids in enumerate(np.asarray(mixed)):
        same = ids[:, None] == ids
        for wide in range(4):
            block, start, after = slice(128 * wide, 128 * wide + 128), 128 * wide, 128 * wide + 128
            assert not same[block, : 64 * first[row, wide]].any()
            assert same[block, 64 * alike_from[row, wide] : start].all()
            assert not same[64 * end[row, wide] :, block].any()
            assert same[after : 64 * alike_to[row, wide], block].all()


def test_gradient_without_a_tape():
    """Of the cache too, as the XLA form's."""
    q, k, v, d_out = (part[0] for part in inputs(1, 20, 2, 1, 16, jnp.float32))
    cache = DepthCache(*(normal(seed, jnp.float32, 3, 20, 16) for seed in (1, 2)))

    def gradients(form):
        return jax.vjp(lambda *floats: form(*floats, jnp.int32(2)), q, k, v, cache)[1]((d_out, cache))

    for got, want in zip(
        *map(jax.tree.leaves, map(gradients, (over_depths.depth_attention, xla.depth_attention))), strict=True
    ):
        close(got, want, jnp.float32)


def test_what_the_kernels_do_not_take():
    """Each reason by its name; the paper's shapes are taken."""
    paper, half = (537, 480, 1024), jnp.bfloat16
    assert triton.unsupported(262144, paper, half) is None
    assert triton.unsupported(8, paper, half) is None
    reasons = {
        "the matrix units take 16 bits, not float32": (262144, paper, jnp.float32),
        "a side of 8 is less than 16": (262144, (537, 8, 1024), half),
        "rows of 477 and 1024 are not multiples of 16 bytes": (262144, (537, 477, 1024), half),
        "places in an array are counted in 32 bits": (262144, (4096, 1024, 1024), half),
    }
    assert {triton.unsupported(*arguments): arguments for arguments in reasons.values()} == reasons
    cache = empty_cache(2, 4, 2, 64, half)
    assert over_depths.unsupported((4, 4, 64), cache, WHOLE) is None
    assert over_depths.unsupported((4, 4, 64), cache, Window(1, 1)) == "a window is looked at"
    assert over_depths.unsupported((4, 4, 96), cache, WHOLE) == "a head size of 96 isn't a power of two up to 256"
    assert over_depths.unsupported((4, 18, 64), cache, WHOLE) == "more than 8 of 18 heads share a key"
    assert sequence.unsupported((8, 4096, 16, 128), 8, half) is None
    reasons = {
        "the matrix units take 16 bits, not float32": ((8, 4096, 16, 128), jnp.float32),
        "a sequence of 4000 is not a multiple of 128": ((8, 4000, 16, 128), half),
        "a head size of 80 isn't a power of two from 16 to 128": ((8, 4096, 16, 80), half),
    }
    assert {sequence.unsupported(shape, 8, dtype): (shape, dtype) for shape, dtype in reasons.values()} == reasons


def test_where_there_is_no_triton(monkeypatch):
    """A jax without it, or another maker's GPU: the plain forms, with the reason; nothing fails before."""
    with monkeypatch.context() as change:
        change.setattr("pallas_kernels.gpu.plgpu", None)
        assert gpu.unsupported(1) == f"jax {jax.__version__} has no Pallas for Triton"
        assert triton.unsupported(64, (4, 16, 16), jnp.bfloat16) == gpu.unsupported(1)
    device = types.SimpleNamespace(client=types.SimpleNamespace(platform_version="PJRT C API\nrocm 70200"))
    monkeypatch.setattr("jax.devices", lambda: [device])
    assert gpu.unsupported(1) == "the kernels are for NVIDIA GPUs"


@pytest.mark.slow
def test_an_import_without_triton():
    """Everything still loads."""
    lines = "import sys; sys.modules['jax.experimental.pallas.triton'] = None; import pallas_kernels.gpu as gpu"
    command = f"{lines}; import dreamer_jax.blocks.operations; print(gpu.unsupported(1))"
    told = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"jax {jax.__version__} has no Pallas for Triton"


@GPU
def test_a_gpu_takes_them_by_default():
    """What the operations give for bfloat16 there has the kernels in it."""
    q, k, v, _ = (part[0] for part in inputs(1, 64, 1, 1, 128, jnp.bfloat16))
    cache = empty_cache(2, 64, 1, 128, jnp.bfloat16)
    for implementation, there in (("auto", True), ("xla", False)):
        text = jax.jit(DepthAttention(implementation)).lower(q, k, v, cache, jnp.int32(0)).as_text()
        assert ("xla.gpu.triton" in text) == there
