"""Attention of the positions in flight over the caches, softmax in float32. Eq. 1, as in `model.attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    own = "p" if keys.ndim == 5 else ""
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, size)
    logits = jnp.einsum(f"bpgqd,b{own}sgd->bpgqs", grouped, keys, preferred_element_type=jnp.float32) * size**-0.5
    visible = jnp.arange(keys.shape[-3]) <= positions[..., None]  # [B, P, S]
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum(f"bpgqs,b{own}sgd->bpgqd", weights.astype(values.dtype), values)
    return out.reshape(q.shape)


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
