"""What depth attention keeps of a token: its keys and values at every depth so far, or at the newest ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DepthCache(NamedTuple):
    """Keys and values of T tokens at L depths, heads side by side: a slot is written and a prefix read contiguously.

    Attributes:
        keys, values: [L, T, kv d], compute dtype; slot l is filled at depth l, those not yet filled are finite.
    """

    keys: jax.Array
    values: jax.Array

    def heads(self, size: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values as [L, T, kv, d], d = `size`."""
        slots, tokens, _ = self.keys.shape
        return self.keys.reshape(slots, tokens, -1, size), self.values.reshape(slots, tokens, -1, size)


class Ring(DepthCache):
    """Of the newest R depths only: depth l is in slot l mod R, where it takes the place of depth l - R."""

    __slots__ = ()


def empty_cache(slots: int, tokens: int, kv_heads: int, size: int, dtype: jnp.dtype | str) -> DepthCache:
    """A cache of zeros for L = `slots` depths of T = `tokens` tokens."""
    zeros = jnp.zeros((slots, tokens, kv_heads * size), dtype)
    return DepthCache(zeros, zeros)


def write_slot(cache: DepthCache, k: jax.Array, v: jax.Array, depth: jax.Array) -> DepthCache:
    """The cache with k and v, each [T, kv, d], in the slot of `depth`, [] or of each token [T]."""
    if isinstance(cache, Ring):
        depth = depth % cache.keys.shape[0]
    if depth.ndim:
        here = (jnp.arange(cache.keys.shape[0])[:, None] == depth)[..., None]  # [L, T, 1]
        new = (part.reshape(cache.keys.shape[1:]).astype(cache.keys.dtype) for part in (k, v))
        return type(cache)(*(jnp.where(here, part, slots) for slots, part in zip(cache, new, strict=True)))
    return type(cache)(
        *(
            jax.lax.dynamic_update_index_in_dim(slots, new.reshape(slots.shape[1:]).astype(slots.dtype), depth, 0)
            for slots, new in zip(cache, (k, v), strict=True)
        )
    )
