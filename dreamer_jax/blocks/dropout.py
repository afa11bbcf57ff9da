"""Dropout with a key for every row, so that a mesh or microbatches change nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, depth: jax.Array, place: int) -> jax.Array:
    """x [B, ...] with a share of its numbers zero, and the others divided by the share that is left.

    Args:
        x: any array with rows.
        rate: the share, below 1.
        keys: [B], of the rows (`Context.keys`); None in evaluation, which drops nothing.
        depth: l, one number.
        place: tells the uses within a depth apart.
    """
    if keys is None or not rate:
        return x

    def row(key: jax.Array, its: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, depth), place), 1 - rate, its.shape)
        return jnp.where(kept, its / (1 - rate), 0).astype(its.dtype)

    return jax.vmap(row)(keys, x)
