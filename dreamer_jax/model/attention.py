"""Eq. 1: scaled dot-product attention with grouped queries, over the sequence or over the depths of a token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention within each document of a row; softmax in float32.

    Queries are taken in chunks, each against the keys up to its end: about half of the scores, those of the future,
    are never computed, and what is live at once stays small.

    Args:
        q: [B, S, n, d], position-encoded.
        k, v: [B, S, kv, d]; head i of q attends with head i // (n // kv).
        segment_ids: [B, S] int32; tokens see only their own document.

    Returns:
        [B, S, n, d].
    """
    length = q.shape[1]
    # Heads before positions, so that every product below is a plain batch of matrices.
    q, k, v = (jnp.swapaxes(t, 1, 2) for t in (q * q.shape[-1] ** -0.5, k, v))  # [B, n or kv, S, d]
    step = max(64, -(-length // 8))
    chunks = [
        _attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], segment_ids[:, start:end], segment_ids[:, :end])
        for start, end in ((start, min(start + step, length)) for start in range(0, length, step))
    ]
    return jnp.swapaxes(jnp.concatenate(chunks, axis=2), 1, 2)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, q_segment: jax.Array, k_segment: jax.Array) -> jax.Array:
    """Queries [B, n, s, d] that end where the keys and values [B, kv, e, d] end -> [B, n, s, d]."""
    batch, _, queries, size = q.shape
    kv_heads, keys = k.shape[1:3]
    rows = q.reshape(batch, kv_heads, -1, size)  # the queries of all heads that share a key head: [B, kv, n/kv*s, d]
    logits = jnp.einsum("bgqd,bgkd->bgqk", rows, k, preferred_element_type=jnp.float32)
    causal = jnp.arange(keys - queries, keys)[:, None] >= jnp.arange(keys)[None]
    visible = causal & (q_segment[:, :, None] == k_segment[:, None])  # [B, s, e]; every token sees itself
    logits = logits.reshape(batch, kv_heads, -1, queries, keys)
    logits += jnp.where(visible, 0.0, -jnp.inf)[:, None, None]
    weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    summed = jnp.einsum("bgqk,bgkd->bgqd", weights.astype(v.dtype).reshape(*rows.shape[:3], keys), v)
    out = summed.reshape(batch, kv_heads, -1, queries, size) / total
    return out.reshape(q.shape).astype(q.dtype)


@jax.custom_vjp
def depth_attention(q: jax.Array, cache_k: jax.Array, cache_v: jax.Array, depth: jax.Array) -> jax.Array:
    """Attention of a token over its own depths 0..depth (Algorithm 1); softmax in float32.

    Written as multiply-and-reduce over the depths: T tiny matrix products would be slow everywhere.

    Args:
        q: [T, n, d], depth-encoded.
        cache_k, cache_v: [L, T, kv, d], filled up to and including `depth`; later slots are ignored.
        depth: scalar int32.

    Returns:
        [T, n, d].
    """
    return _depth_forward(q, cache_k, cache_v, depth)[0]


def _depth_forward(q, cache_k, cache_v, depth):
    queries, keys, values = _by_group(q, cache_k, cache_v)
    logits = _dot(queries, keys) * q.shape[-1] ** -0.5  # [L, T, kv, n/kv]
    visible = (jnp.arange(keys.shape[0]) <= depth)[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=0)
    out = _sum_over_depths(weights[..., None], values)
    return out.reshape(q.shape).astype(q.dtype), (q, cache_k, cache_v, weights)


def _depth_backward(residuals, d_out):
    q, cache_k, cache_v, weights = residuals
    queries, keys, values = _by_group(q, cache_k, cache_v)
    d_out = d_out.reshape(queries.shape).astype(jnp.float32)
    d_weights = _dot(d_out, values)
    d_logits = weights * (d_weights - jnp.sum(weights * d_weights, axis=0)) * q.shape[-1] ** -0.5
    d_q = _sum_over_depths(d_logits[..., None], keys)
    d_k = jnp.sum(d_logits[..., None] * queries, axis=3)
    d_v = jnp.sum(weights[..., None] * d_out, axis=3)
    return d_q.reshape(q.shape).astype(q.dtype), d_k.astype(cache_k.dtype), d_v.astype(cache_v.dtype), None


depth_attention.defvjp(_depth_forward, _depth_backward)


def _by_group(q, cache_k, cache_v):
    """Float32 queries [T, kv, n/kv, d], keys and values [L, T, kv, 1, d]."""
    _, tokens, kv_heads, size = cache_k.shape
    queries = q.reshape(tokens, kv_heads, -1, size).astype(jnp.float32)
    return queries, *(cache[:, :, :, None].astype(jnp.float32) for cache in (cache_k, cache_v))


def _dot(a, b):
    """Inner product over the last axis, broadcasting the others. A product with ones, because XLA's CPU backend
    doesn't vectorise a sum over the last axis of a broadcast product (ten times slower)."""
    return jnp.einsum("...d,d->...", a * b, jnp.ones(b.shape[-1], jnp.float32), precision="highest")


def _sum_over_depths(weights, rows):
    """sum_l weights[l] * rows[l]. Spelt out: a reduction over the leading axis is forty times slower on the CPU."""
    return functools.reduce(jnp.add, (weights[l] * rows[l] for l in range(rows.shape[0])))
