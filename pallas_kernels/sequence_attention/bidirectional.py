"""Attention in which a position sees its whole document, or what a mask lets it see: one form for every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bidirectional_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, visible: jax.Array | None = None
) -> jax.Array:
    """softmax(q k^T / sqrt(d) + M) v, M being zero where a position is seen and -inf elsewhere; softmax in float32.

    Weights of what isn't seen are exactly zero. A position that sees nothing gets zero.

    Args:
        q: [B, S, n, d], position-encoded.
        k, v: [B, S, kv, d]; head i of q attends with head i // (n // kv).
        segment_ids: [B, S] int32; positions see only their own document.
        visible: [B, S, S] bool, whether row i sees column j; None: all of the document.

    Returns:
        [B, S, n, d].
    """
    batch, length, _, size = q.shape
    # Heads before positions, so that both products are plain batches of matrices.
    rows = (q * size**-0.5).reshape(batch, length, k.shape[2], -1, size).transpose(0, 2, 3, 1, 4)  # [B, kv, n/kv, S, d]
    keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, kv, S, d]
    logits = jnp.einsum("bgnqd,bgkd->bgnqk", rows, keys, preferred_element_type=jnp.float32)
    seen = segment_ids[:, :, None] == segment_ids[:, None]
    if visible is not None:
        seen = seen & visible
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)  # at least 1 where anything is seen
    summed = jnp.einsum("bgnqk,bgkd->bgnqd", weights.astype(v.dtype), values)
    out = summed / jnp.where(total > 0, total, 1)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
