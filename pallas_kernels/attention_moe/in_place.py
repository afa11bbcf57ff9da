"""The linear map of a selected expert where its matrix lies: for decoding, forward only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.in_place import BLOCKED, block_for, by_expert
from pallas_kernels.dispatch.shares import fetch, plan_shares, token_of
from pallas_kernels.weights import OutputRows, at


def linear(x: jax.Array, index: jax.Array, weight: Any) -> jax.Array:
    """x times the matrix of each row's expert, shared experts folded in.

    Args:
        x: [T, a].
        index: int32, [T], or [] for all rows. G stands for no expert: zero.
        weight: [G, a, b], for one expert for all rows; or `OutputRows` of it.

    Returns:
        [T, b].
    """
    if not isinstance(weight, OutputRows):
        return x @ at(weight, index)
    if index.ndim == 0 and len(x) > 1:
        return weight.product(x, index)
    count, size = weight.shape[:2]
    if len(x) >= BLOCKED * count and weight.matrices.dtype == x.dtype == jnp.float32:
        return _in_shares(x, index, weight)
    return by_expert(x, index.reshape(-1, 1), count, count, size, weight.product)[:, 0]


def _in_shares(x: jax.Array, index: jax.Array, weight: OutputRows) -> jax.Array:
    """`linear` of many rows: one and a half times the mean rows of all experts in one product, which copies no matrix,
    and what busier experts have beyond that block by block."""
    rows, count = len(x), weight.shape[0]
    size = min(rows, 3 * rows // (2 * count))
    plan = plan_shares(index[:, None], count, (size, min(size, block_for(rows // count))))
    shares = fetch(x, token_of(plan.share, plan.place.shape))  # [G, C, a]
    found = plan.of_pairs(jnp.einsum("nra,nba->nrb", shares, weight.matrices))[:, 0]  # [T, b]
    if not len(plan.rest):  # a single expert's share has room for all
        return found

    def block(n: jax.Array, out: jax.Array) -> jax.Array:
        pairs = at(plan.rest, n)
        its = weight.product(fetch(x, token_of(pairs, plan.place.shape)), at(plan.rest_expert, n))
        return out.at[pairs].set(its, mode="drop")

    return jax.lax.fori_loop(0, plan.used, block, found)
