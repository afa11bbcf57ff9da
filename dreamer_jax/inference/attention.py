"""Attention of the positions in flight over the caches, softmax in float32. Eq. 1, as in `model.attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

FEW = 4
"""Queries of a row up to which they are taken together."""


def attend_sequence(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Queries over the slots 0..position of their row.

    Args:
        q: [B, P, n, d], position-encoded.
        keys, values: [B, S, kv, d], or [B, P, S, kv, d] where every query has its own (positions at different depths).
        positions: [B, P] int32.

    Returns:
        [B, P, n, d].
    """
    batch, queries, heads, size = q.shape
    kv_heads = keys.shape[-2]
    visible = jnp.arange(keys.shape[-3]) <= positions[..., None]  # [B, P, S]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, size) * size**-0.5
    if keys.ndim == 4 and queries <= FEW:
        return _attend_few(grouped, keys, values, visible).reshape(q.shape)
    own = "p" if keys.ndim == 5 else ""
    logits = jnp.einsum(f"bpgqd,b{own}sgd->bpgqs", grouped, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum(f"bpgqs,b{own}sgd->bpgqd", weights.astype(values.dtype), values).reshape(q.shape)


def _attend_few(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Few queries [B, P, kv, n/kv, d] over [B, S, kv, d], as one product a row over all heads at once.

    Queries are zero outside their own head's part of the key. That is kv times the multiplications, all of them on
    numbers that had to be read anyway, and the cache is read in its own order; products head by head have to
    transpose it first, which takes longer than everything else.
    """
    batch, queries, kv_heads, shared, size = q.shape
    slots = keys.shape[1]
    diagonal = jnp.eye(kv_heads, dtype=q.dtype)
    spread = jnp.einsum("bpgqd,gh->bpgqhd", q, diagonal).reshape(batch, -1, kv_heads * size)
    logits = jnp.einsum(
        "bqc,bsc->bqs", spread, keys.reshape(batch, slots, -1), preferred_element_type=jnp.float32
    ).reshape(batch, queries, -1, slots)
    weights = jax.nn.softmax(jnp.where(visible[:, :, None], logits, -jnp.inf), axis=-1)
    weights = weights.astype(values.dtype).reshape(batch, -1, slots)
    out = jnp.einsum("bqs,bsc->bqc", weights, values.reshape(batch, slots, -1))
    return jnp.einsum("bpgqhd,gh->bpgqd", out.reshape(batch, queries, kv_heads, shared, kv_heads, size), diagonal)


def attend_depth(q: jax.Array, keys: jax.Array, values: jax.Array, depths: jax.Array) -> jax.Array:
    """Queries over the depths 0..depth of their own position.

    Args:
        q: [B, P, n, d], depth-encoded.
        keys, values: [L, B, P, kv, d].
        depths: [] or [B, P] int32.

    Returns:
        [B, P, n, d].
    """
    batch, queries, heads, size = q.shape
    kv_heads = keys.shape[-2]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, size)
    logits = jnp.einsum("bpgqd,lbpgd->bpgql", grouped, keys, preferred_element_type=jnp.float32) * size**-0.5
    visible = jnp.arange(keys.shape[0]) <= depths[..., None]  # [L] or [B, P, L]
    visible = jnp.broadcast_to(visible, (batch, queries, keys.shape[0]))[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bpgql,lbpgd->bpgqd", weights.astype(values.dtype), values)
    return out.reshape(q.shape)
