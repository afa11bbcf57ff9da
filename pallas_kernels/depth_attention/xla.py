"""Depth attention without a kernel: multiply and reduce over the slots, for the CPU, GPUs and shapes no kernel takes.

T tiny matrix products would be slow everywhere.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.depth_attention.cache import DepthCache, write_slot
from pallas_kernels.tape import Tape


class CacheGradient(flax.struct.PyTreeNode, Tape):
    """The float32 gradient of the cache: deeper depths add theirs to the slots of the shallower ones.

    Attributes:
        keys, values: [L, T, kv d].
    """

    keys: jax.Array
    values: jax.Array


def depth_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: DepthCache,
    depth: jax.Array,
    tape: Tape | None = None,
) -> tuple[jax.Array, DepthCache]:
    """Same contract as `DepthAttention`; the tape is that of `start_tape` here."""
    if tape is None:
        cache = write_slot(cache, k, v, depth)
        return attend(q, cache, depth), cache
    cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)
    return _attend_taped(q, k, v, cache, depth, tape), cache


def start_tape(cache: DepthCache) -> CacheGradient:
    """The empty tape for a cache of this shape."""
    return CacheGradient(*(jnp.zeros(slots.shape, jnp.float32) for slots in cache))


@jax.custom_vjp
def attend(q: jax.Array, cache: DepthCache, depth: jax.Array) -> jax.Array:
    """Attention of q [T, n, d] over slots 0 .. depth, [] or of each token [T]: [T, n, d]."""
    return weighed(q, cache, depth)[0]


def weighed(q: jax.Array, cache: DepthCache, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, and the softmax's weights [L, T, kv, n/kv] float32, zero above the depth."""
    queries, keys, values = _by_group(q, cache)
    logits = _dot(queries, keys) * q.shape[-1] ** -0.5  # [L, T, kv, n/kv]
    visible = jnp.expand_dims(jnp.arange(keys.shape[0]), tuple(range(1, 1 + depth.ndim))) <= depth  # [L] or [L, T]
    visible = visible.reshape(*visible.shape, *[1] * (4 - visible.ndim))
    weights = jax.nn.softmax(_flat(jnp.where(visible, logits, -jnp.inf)), axis=0).reshape(logits.shape)
    out = _sum_over_depths(weights[..., None], values)
    return out.reshape(q.shape).astype(q.dtype), weights


def gradients(q: jax.Array, cache: DepthCache, weights: jax.Array, d_out: jax.Array) -> tuple[jax.Array, DepthCache]:
    """d_q as q, and what this depth adds to the cache's gradient, float32."""
    queries, keys, values = _by_group(q, cache)
    d_out = d_out.reshape(queries.shape).astype(jnp.float32)
    shares, d_shares = _flat(weights), _flat(_dot(d_out, values))
    d_logits = shares * (d_shares - jnp.sum(shares * d_shares, axis=0)) * q.shape[-1] ** -0.5
    d_logits = d_logits.reshape(weights.shape)
    d_q = _sum_over_depths(d_logits[..., None], keys)
    d_k, d_v = _sum_over_group(d_logits, queries), _sum_over_group(weights, d_out)
    d_cache = DepthCache(d_k.reshape(cache.keys.shape), d_v.reshape(cache.values.shape))
    return d_q.reshape(q.shape).astype(q.dtype), d_cache


def _forward(q, cache, depth):
    out, weights = weighed(q, cache, depth)
    return out, (q, cache, weights)


def _backward(residuals, d_out):
    q, cache, weights = residuals
    d_q, d_cache = gradients(q, cache, weights, d_out)
    return d_q, jax.tree.map(lambda d, slots: d.astype(slots.dtype), d_cache, cache), None


attend.defvjp(_forward, _backward)


@jax.custom_vjp
def _attend_taped(q, k, v, cache, depth, tape):
    del k, v, tape  # k and v are in the cache already; here they are what gets the gradient
    return attend(q, cache, depth)


def _forward_taped(q, k, v, cache, depth, tape):
    out, weights = weighed(q, cache, depth)
    return out, (q, cache, weights, depth, tape)


def _backward_taped(residuals, d_out):
    q, cache, weights, depth, tape = residuals
    d_q, d_cache = gradients(q, cache, weights, d_out)
    tape = CacheGradient(tape.keys + d_cache.keys, tape.values + d_cache.values)
    d_k, d_v = (
        jax.lax.dynamic_index_in_dim(total, depth, 0, keepdims=False).reshape(q.shape[0], -1, q.shape[-1])
        for total in (tape.keys, tape.values)
    )
    return d_q, d_k.astype(q.dtype), d_v.astype(q.dtype), None, None, tape


_attend_taped.defvjp(_forward_taped, _backward_taped)


def _by_group(q, cache):
    """Float32 queries [T, kv, n/kv, d], keys and values [L, T, kv, 1, d]."""
    keys, values = cache.heads(q.shape[-1])
    queries = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[-1]).astype(jnp.float32)
    return queries, *(slots[:, :, :, None].astype(jnp.float32) for slots in (keys, values))


def _dot(a, b):
    """Inner product over the last axis, broadcasting the others. A product with ones, because XLA's CPU backend
    doesn't vectorise a sum over the last axis of a broadcast product (ten times slower)."""
    return jnp.einsum("...d,d->...", a * b, jnp.ones(b.shape[-1], jnp.float32), precision="highest")


def _sum_over_depths(weights, rows):
    """sum_l weights[l] * rows[l]. Spelt out: a reduction over the leading axis is forty times slower on the CPU."""
    return functools.reduce(jnp.add, (weights[l] * rows[l] for l in range(rows.shape[0])))


def _sum_over_group(weights, rows):
    """sum_g weights[.., g] * rows[.., g, :], spelt out too: up to twenty times faster than a reduction there."""
    group = range(rows.shape[-2])
    return functools.reduce(jnp.add, (weights[..., g, None] * rows[..., g, :] for g in group))


def _flat(rows):
    """[L, ...] as [L, N]: XLA's CPU backend computes along the last axis, which with single heads would be one long."""
    return rows.reshape(rows.shape[0], -1)
