"""The definition (Algorithm 1): one softmax over the filled slots, plain autodiff."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.depth_attention.cache import DepthCache, write_slot
from pallas_kernels.depth_attention.window import WHOLE, Window


def depth_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, window: Window = WHOLE
) -> tuple[jax.Array, DepthCache]:
    """Same contract as `DepthAttention`, without a tape; the cache has a slot for every depth."""
    cache = write_slot(cache, k, v, depth)
    keys, values = cache.heads(q.shape[-1])  # [L, T, kv, d]
    queries = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[-1]).astype(jnp.float32)
    logits = jnp.einsum("tgnd,ltgd->ltgn", queries, keys.astype(jnp.float32), precision="highest")
    visible = visible_slots(keys.shape[0], depth, window)[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits * q.shape[-1] ** -0.5, -jnp.inf), axis=0)
    out = jnp.einsum("ltgn,ltgd->tgnd", weights, values.astype(jnp.float32), precision="highest")
    return out.reshape(q.shape).astype(q.dtype), cache


def visible_slots(slots: int, depth: jax.Array, window: Window) -> jax.Array:
    """Which slots of a cache of every depth are seen at `depth`, []: [L] bool."""
    back = depth - jnp.arange(slots)
    newest = back < window.size * window.dilation if window.size else True
    return (back >= 0) & (back % window.dilation == 0) & newest
