"""Both attentions against their definitions, at lengths that are computed in several parts: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.depth_attention import DepthCache
from pallas_kernels.depth_attention.xla import depth_attention
from pallas_kernels.sequence_attention.xla import sequence_attention

TOLERANCE = 1e-5  # of the largest element, float32 against float32
HEADS, KV_HEADS, SIZE = 6, 2, 4


def normal(seed, *shape):
    """Float32 standard normal."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def define_sequence_attention(q, k, v, segment_ids):
    """One masked softmax over all positions."""
    k, v = (jnp.repeat(t, HEADS // KV_HEADS, axis=2) for t in (k, v))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(SIZE)
    visible = np.tril(np.ones((q.shape[1],) * 2, bool)) & (segment_ids[:, :, None] == segment_ids[:, None])
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


def define_depth_attention(q, cache_k, cache_v, depth):
    """Softmax over the filled slots alone."""
    keys, values = (jnp.repeat(t[: depth + 1], HEADS // KV_HEADS, axis=2) for t in (cache_k, cache_v))
    weights = jax.nn.softmax(jnp.einsum("tnd,ltnd->ltn", q, keys) / np.sqrt(SIZE), axis=0)
    return jnp.einsum("ltn,ltnd->tnd", weights, values)


def assert_same_with_gradients(actual, expected, inputs):
    """Value and every input's gradient, for a random cotangent."""
    value, vjp = jax.vjp(jax.jit(actual), *inputs)
    wanted, wanted_vjp = jax.vjp(jax.jit(expected), *inputs)
    cotangent = normal(7, *wanted.shape)
    for got, want in zip((value, *vjp(cotangent)), (wanted, *wanted_vjp(cotangent)), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * float(jnp.abs(want).max()))


@pytest.mark.parametrize("length", [1, 64, 65, 150, 531])
def test_sequence_attention(length):
    """Two packed rows: documents that begin and end anywhere, and padding at the end."""
    rng = np.random.default_rng(length)
    segment_ids = np.stack([np.sort(rng.integers(1, 5, length)), np.ones(length)]).astype(np.int32)
    segment_ids[0, length - length // 7 :] = 0
    inputs = [normal(n, 2, length, heads, SIZE) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    inputs[0] *= 3  # sharp enough for a wrong mask to matter
    assert_same_with_gradients(
        lambda q, k, v: sequence_attention(q, k, v, segment_ids),
        lambda q, k, v: define_sequence_attention(q, k, v, segment_ids),
        inputs,
    )


def test_sequence_attention_with_large_scores():
    """Scores beyond float32's exponential neither overflow nor lose a whole document."""
    q, k, v = (normal(n, 1, 70, heads, SIZE) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    segment_ids = np.repeat([[1, 2]], 35, axis=1).astype(np.int32)
    k[:, :35] *= 200  # the first document's maximum must not be the second's
    inputs = (q * 30, k, v)
    got, want = sequence_attention(*inputs, segment_ids), define_sequence_attention(*inputs, segment_ids)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_depth_attention(depth):
    """Slots above the current depth hold large numbers, which neither give nor get anything."""
    q = 3 * normal(0, 9, HEADS, SIZE)
    slots_k, slots_v = (normal(n, 5, 9, KV_HEADS, SIZE) for n in (1, 2))
    new_k, new_v = (normal(n, 9, KV_HEADS, SIZE) for n in (3, 4))
    slots_k[depth:] *= 1e4
    slots_v[depth:] *= 1e4

    def ours(q, k, v, slots_k, slots_v):
        cache = DepthCache(slots_k.reshape(5, 9, -1), slots_v.reshape(5, 9, -1))
        return depth_attention(q, k, v, cache, jnp.int32(depth))[0]

    def defined(q, k, v, slots_k, slots_v):
        return define_depth_attention(q, slots_k.at[depth].set(k), slots_v.at[depth].set(v), depth)

    assert_same_with_gradients(ours, defined, (q, new_k, new_v, jnp.asarray(slots_k), jnp.asarray(slots_v)))
