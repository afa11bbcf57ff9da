"""Routers that may choose among some of the experts only, others at other depths (section 4.2)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.positions import Depth
from dreamer_jax.config.expert_subsets import ExpertSubsets


def among(subsets: ExpertSubsets | None, depth: Depth) -> jax.Array | None:
    """The experts [n] int32 of a depth that is the same for all tokens, so that no others need be looked at; None where
    it isn't, or where every depth has all of them."""
    if subsets is None or depth.index.ndim:
        return None
    return jnp.asarray(subsets.by_depth, jnp.int32)[jnp.minimum(depth.index, subsets.depth - 1)]


def only_eligible(logits: jax.Array, subsets: ExpertSubsets | None, depth: Depth) -> jax.Array:
    """Logits [T, E] of tokens at depths [T] of their own, minus infinity for the experts that theirs hasn't got."""
    if subsets is None:
        return logits
    rows = jnp.asarray(eligible(subsets, subsets.depth))[jnp.minimum(depth.index, subsets.depth - 1)]
    return jnp.where(rows, logits, -jnp.inf)


@functools.lru_cache
def eligible(subsets: ExpertSubsets, depths: int) -> np.ndarray:
    """[depths, E] bool: whether an expert can be chosen at a depth."""
    table = np.zeros((depths, subsets.num_experts), bool)
    for row, depth in zip(table, range(depths), strict=True):
        row[list(subsets.by_depth[min(depth, subsets.depth - 1)])] = True
    return table


def even_share(counts: Any, table: np.ndarray) -> Any:
    """How often each expert would have been selected if every depth had used those that it has evenly.

    Args:
        counts: [L, E], how often each was, at depths that may be none's (nothing was selected there).
        table: see `eligible`.

    Returns:
        [E] float, zero for experts that no depth could have selected.
    """
    each = counts.sum(axis=-1) / table.sum(axis=-1)
    return (each[:, None] * table).sum(axis=0)
