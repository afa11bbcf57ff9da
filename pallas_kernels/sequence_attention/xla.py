"""Sequence attention without a kernel, in chunks of queries: what a CPU takes."""

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
    starts = range(0, length, step)
    ends = (*starts[1:], length)
    chunks = [
        _attend(q[:, :, start:end], keys, values, segment_ids[:, start:end], segment_ids[:, :end])
        for start, end, keys, values in zip(starts, ends, _beginnings(k, ends), _beginnings(v, ends), strict=True)
    ]
    return jnp.swapaxes(jnp.concatenate(chunks, axis=2), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _beginnings(x: jax.Array, ends: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """x [B, kv, S, d] up to each end, the last of which is S.

    The gradients of shorter ones are added to the longest where they belong. Left to itself, autodiff fills each up
    with zeros to all S, which XLA does again in everything that its sum is fused into.
    """
    return tuple(x[:, :, :end] for end in ends)


def _beginnings_forward(x, ends):
    return _beginnings(x, ends), None


def _beginnings_backward(ends, _, d_beginnings):
    *shorter, total = d_beginnings
    for end, d_beginning in zip(ends[-2::-1], reversed(shorter), strict=True):
        total = jax.lax.dynamic_update_slice(total, total[:, :, :end] + d_beginning, (0, 0, 0, 0))
    return (total,)


_beginnings.defvjp(_beginnings_forward, _beginnings_backward)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, q_segment: jax.Array, k_segment: jax.Array) -> jax.Array:
    """Queries [B, n, s, d] that end where the keys and values [B, kv, e, d] end -> [B, n, s, d]."""
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1:3]
    shared = heads // kv_heads
    # The queries of all heads that share a key head are rows of one product, and stay so: what is kept for the backward
    # pass is kept once.
    rows = q.reshape(batch, kv_heads, shared * queries, size)
    logits = jnp.einsum("bgqd,bgkd->bgqk", rows, k, preferred_element_type=jnp.float32)
    causal = jnp.arange(keys - queries, keys)[:, None] >= jnp.arange(keys)[None]
    visible = causal & (q_segment[:, :, None] == k_segment[:, None])  # [B, s, e]; every token sees itself
    logits += jnp.tile(jnp.where(visible, 0.0, -jnp.inf), (1, shared, 1))[:, None]
    weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    summed = jnp.einsum("bgqk,bgkd->bgqd", weights.astype(v.dtype), v)
    out = summed / jnp.sum(weights, axis=-1, keepdims=True)
    return out.reshape(q.shape).astype(q.dtype)
