"""The definition (Eq. 1): one masked softmax over all positions, plain autodiff."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Same contract as `SequenceAttention`."""
    batch, length, _, size = q.shape
    queries = q.reshape(batch, length, k.shape[2], -1, size).astype(jnp.float32)
    logits = jnp.einsum("bqgnd,bkgd->bgnqk", queries, k.astype(jnp.float32), precision="highest") * size**-0.5
    same = segment_ids[:, :, None] == segment_ids[:, None]
    visible = (same & jnp.tril(jnp.ones((length, length), bool)))[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bgnqk,bkgd->bqgnd", weights, v.astype(jnp.float32), precision="highest")
    return out.reshape(q.shape).astype(q.dtype)
