"""Sequence attention by kernel and by jax.nn against the definition, with packed documents: values and gradients."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend, tiles
from pallas_kernels.sequence_attention import SequenceAttention, gpu, reference
from pallas_kernels.sequence_attention.shapes import block_of, largest_block, unsupported
from tests.pallas_kernels.interpreting import on_two_cores

FLOAT32, BFLOAT16 = 1e-5, 2.0**-6
KERNEL = SequenceAttention("pallas")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks at sizes that are quick to interpret."""
    small = tiles.Generation("small", cores=1, vmem=1 << 40, sequence_block=128)
    monkeypatch.setattr("pallas_kernels.sequence_attention.tpu.INTERPRETED", small)


def inputs(length, heads, kv_heads, size, dtype=jnp.float32, seed=0):
    """q, k, v and d_out; and documents that begin and end inside blocks, padding last."""
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    arrays = [jnp.asarray(rng.normal(size=(2, length, n, size)), dtype) for n in counts]
    cuts = np.array([[0.3, 0.5, 0.9], [0.1, 0.6, 1.0]]) * length
    segment_ids = (np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1) + 1
    segment_ids[segment_ids == 4] = 0
    return arrays, jnp.asarray(segment_ids, jnp.int32)


def value_and_gradients(operation, arrays, segment_ids):
    """out, d_q, d_k, d_v."""
    q, k, v, d_out = arrays

    @jax.jit
    def run(q, k, v, d_out):
        out, vjp = jax.vjp(lambda q, k, v: operation(q, k, v, segment_ids), q, k, v)
        return out, *vjp(d_out)

    return run(q, k, v, d_out)


def assert_close(actual, expected, tolerance):
    """To a share of the largest element."""
    for got, want in zip(actual, expected, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(
    ("dtype", "size", "tolerance"),
    [(jnp.float32, 128, FLOAT32), (jnp.bfloat16, 128, BFLOAT16), (jnp.float32, 96, FLOAT32)],
)
def test_kernels_compute_the_definition(dtype, size, tolerance):
    """Grouped queries, two blocks of keys, documents that share blocks; heads of 96 are padded to 128."""
    arrays, segment_ids = inputs(256, 4, 2, size, dtype)
    wide = [part.astype(jnp.float32) for part in arrays]
    expected = value_and_gradients(reference.sequence_attention, wide, segment_ids)
    actual = value_and_gradients(KERNEL, arrays, segment_ids)
    assert actual[0].dtype == dtype
    assert_close(actual, expected, tolerance)


def test_two_cores_do_not_race():
    """The forward kernel as a TPU would run it, two blocks of queries; uninitialised memory is NaN."""
    arrays, segment_ids = inputs(256, 2, 1, 128)
    actual = on_two_cores(lambda *arrays: KERNEL(*arrays, segment_ids), *arrays[:3])
    assert_close([actual], [reference.sequence_attention(*arrays[:3], segment_ids)], FLOAT32)


@pytest.mark.slow_but("512-256", "640")
@pytest.mark.parametrize(("length", "block"), [(512, 512), (512, 256), (768, 768), (640, 640)])
def test_keys_of_a_block_that_are_taken_at_once(monkeypatch, length, block):
    """Parts of a block: scores above the diagonal are left out but for those of its own part."""
    larger = dataclasses.replace(tiles.INTERPRETED, sequence_block=block)
    monkeypatch.setattr("pallas_kernels.sequence_attention.tpu.INTERPRETED", larger)
    monkeypatch.setattr("pallas_kernels.sequence_attention.forward.KEYS", 384)
    arrays, segment_ids = inputs(length, 2, 1, 128)
    assert_close([KERNEL(*arrays[:3], segment_ids)], [reference.sequence_attention(*arrays[:3], segment_ids)], FLOAT32)


def test_large_heads_have_smaller_blocks():
    """What a core has room for, as compiled: v4 has it for 128 in blocks of 1024, the others for 256."""
    found = [
        largest_block(size, jnp.bfloat16, tiles.GENERATIONS[chip])
        for chip in ("v4", "v5p")
        for size in (96, 192, 256, 320, 512)
    ]
    assert found == [1024, 512, 512, 256, 256, 1024, 1024, 1024, 512, 512]
    assert block_of(1536, largest_block(192, jnp.bfloat16, tiles.GENERATIONS["v4"])) == 512
    assert largest_block(1 << 20, jnp.bfloat16, tiles.GENERATIONS["v4"]) == 128
    assert largest_block(192, jnp.float32, tiles.GENERATIONS["v5p"]) == 512


def test_a_large_head_computes_the_definition(monkeypatch):
    """Blocks of a half, 128, because of the head's size."""
    small = dataclasses.replace(tiles.INTERPRETED, sequence_block=256, sequence_head=64)
    monkeypatch.setattr("pallas_kernels.sequence_attention.tpu.INTERPRETED", small)
    arrays, segment_ids = inputs(256, 2, 1, 128)
    expected = value_and_gradients(reference.sequence_attention, arrays, segment_ids)
    assert_close(value_and_gradients(KERNEL, arrays, segment_ids), expected, FLOAT32)


@pytest.mark.slow
@given(
    blocks=st.integers(1, 4),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    size=st.sampled_from([48, 64, 96, 128]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_kernels_at_random_shapes(blocks, group, kv_heads, size, seed):
    """Sequences of any multiple of 128; blocks of 256 where those divide, so 384 is not a multiple of the table's."""
    larger = dataclasses.replace(tiles.INTERPRETED, sequence_block=256)
    with mock.patch("pallas_kernels.sequence_attention.tpu.INTERPRETED", larger):
        arrays, segment_ids = inputs(128 * blocks, group * kv_heads, kv_heads, size, seed=seed)
        actual = value_and_gradients(KERNEL, arrays, segment_ids)
    assert_close(actual, value_and_gradients(reference.sequence_attention, arrays, segment_ids), FLOAT32)


def test_the_form_for_gpus():
    """jax.nn.dot_product_attention with a mask; on a CPU it takes the XLA form of the same call."""
    arrays, segment_ids = inputs(70, 4, 2, 8)
    expected = value_and_gradients(reference.sequence_attention, arrays, segment_ids)
    assert_close(value_and_gradients(gpu.sequence_attention, arrays, segment_ids), expected, FLOAT32)


@pytest.mark.gpu
def test_cudnn_attention():
    """cuDNN's flash attention, which takes bfloat16 only, at a length that our kernels don't take."""
    arrays, segment_ids = inputs(500, 4, 2, 128, jnp.bfloat16)
    wide = [part.astype(jnp.float32) for part in arrays]
    expected = value_and_gradients(reference.sequence_attention, wide, segment_ids)
    assert_close(value_and_gradients(gpu.sequence_attention, arrays, segment_ids), expected, BFLOAT16)


def test_heads_that_padding_would_double():
    assert unsupported((1, 128, 4, 32), 4) == "a head size of 32 would have to be padded to 64"
    assert unsupported((1, 128, 4, 96), 4) is None


def test_other_shapes_take_xla_and_say_so(caplog):
    """A length that no block divides."""
    backend._say_once.cache_clear()
    arrays, segment_ids = inputs(70, 4, 2, 128)
    expected = value_and_gradients(reference.sequence_attention, arrays, segment_ids)
    assert_close(value_and_gradients(KERNEL, arrays, segment_ids), expected, FLOAT32)
    assert [r.message for r in caplog.records if r.name == "pallas_kernels"] == [
        "sequence attention without a kernel: a sequence of 70 is not a multiple of 128"
    ]
