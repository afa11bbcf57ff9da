"""Eq. 1: scaled dot-product attention with grouped queries, over the sequence or over the depths of a token."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention within each document of a row; softmax in float32.

    Args:
        q: [B, S, n, d], position-encoded.
        k, v: [B, S, kv, d]; head i of q attends with head i // (n // kv).
        segment_ids: [B, S] int32; tokens see only their own document.

    Returns:
        [B, S, n, d].
    """
    batch, length, heads, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, size)
    logits = jnp.einsum("bqgnd,bkgd->bgnqk", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = (causal & same_document)[:, None, None]  # [B, 1, 1, S, S]; every token sees itself
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bgnqk,bkgd->bqgnd", weights, v).reshape(q.shape)


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
    slots, tokens, kv_heads, size = cache_k.shape
    grouped = q.reshape(tokens, kv_heads, -1, size).astype(jnp.float32)  # [T, kv, n/kv, d]
    keys, values = (cache[:, :, :, None].astype(jnp.float32) for cache in (cache_k, cache_v))
    logits = jnp.sum(grouped * keys, axis=-1) * size**-0.5  # [L, T, kv, n/kv]
    visible = (jnp.arange(slots) <= depth)[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=0)
    out = jnp.sum(weights[..., None] * jnp.where(visible[..., None], values, 0.0), axis=0)
    return out.reshape(q.shape).astype(q.dtype)
