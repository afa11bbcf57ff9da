"""Rows of experts as a CPU's products like them: an equal share for every expert, and the rest in groups of blocks.

The first C rows of all experts are one batched product with their matrices as they lie: no matrix is fetched for a
block, and no gradient of a block is added up. What busier experts have beyond C rows goes in blocks, so few at a time
that their matrices stay in the cache, and only as many groups are computed as there are. So nothing is dropped, and
room that no routing needs costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.api import block_size_for, sorted_pairs

GROUP_ROWS = 512
"""Rows of a group of blocks."""
ROOMY = 1024
"""Up to so many rows in all, every expert's share has room for every token, and there is no rest: that is two groups'
work, and a program without loops, which compiles a fifth sooner."""


class Shares(NamedTuple):
    """Where each (token, choice) pair goes. T * k stands for no pair: padding.

    Attributes:
        share: [E, C] int32, the pairs of every expert's share.
        place: [T, k] int32, where a pair is in it, flat; E * C: in the rest, or it has no expert.
        rest: [N, b] int32, the pairs beyond, in blocks of one expert.
        rest_expert: [N] int32.
        used: scalar int32, blocks of the rest that hold a pair; they come first.
    """

    share: jax.Array
    place: jax.Array
    rest: jax.Array
    rest_expert: jax.Array
    used: jax.Array

    @property
    def here(self) -> jax.Array:
        """[T, k] bool: whether a pair is in a share."""
        return self.place < self.share.size

    def of_pairs(self, rows: jax.Array) -> jax.Array:
        """Rows of the shares for the pairs that are there, zero for the rest: [E, C, ...] -> [T, k, ...]."""
        flat = rows.reshape(-1, *rows.shape[2:])
        found = fetch(flat, jnp.minimum(self.place, self.share.size - 1))  # for the rest another token's
        return jnp.where(self.here.reshape(*self.here.shape, *[1] * (found.ndim - 2)), found, 0)

    def over_rest(self, add: Callable[[jax.Array, jax.Array, Any], Any], totals: Any) -> Any:
        """Goes over the rest: add(pairs [g, b], experts [g], totals) -> totals, for each group of blocks."""
        count = len(self.rest)
        if not count:
            return totals
        size = min(count, max(1, GROUP_ROWS // self.rest.shape[1]))

        def group(i: jax.Array, totals: Any) -> Any:
            # The last group may overlap with the one before: what that has had is padding here.
            first = jnp.minimum(i * size, count - size)
            pairs = jax.lax.dynamic_slice_in_dim(self.rest, first, size)
            fresh = first + jnp.arange(size) >= i * size
            pairs = jnp.where(fresh[:, None], pairs, self.place.size)
            return add(pairs, jax.lax.dynamic_slice_in_dim(self.rest_expert, first, size), totals)

        return jax.lax.fori_loop(0, -(-self.used // size), group, totals)


def fetch(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], without a check of its bounds."""
    return rows.at[index].get(mode="promise_in_bounds")


def fetch_or_zero(rows: jax.Array, pairs: jax.Array) -> jax.Array:
    """Numbers of pairs [T, k], and zero for padding."""
    return fetch(jnp.append(rows.reshape(-1), 0), pairs)


def token_of(pairs: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The tokens of pairs of [T, k]; of padding some token: mask what you sum."""
    return jnp.minimum(pairs // shape[1], shape[0] - 1)


def sizes_for(tokens: int, choices: int, num_experts: int) -> tuple[int, int]:
    """(C, b): near three quarters of the mean rows of an expert, so that few places of a share are empty even where
    experts aren't used alike; and the rows of a block, at most C. All tokens, where there are few of them.

    Measured on two CPU cores (docs/benchmarks.md, how experts are computed in training on a CPU).
    """
    if tokens * num_experts <= ROOMY:
        return tokens, tokens
    pairs = tokens * choices
    share = max(8, 16 * round(0.75 * pairs / num_experts / 16))
    return share, min(share, block_size_for(pairs, num_experts))


def plan_shares(indices: jax.Array, num_experts: int, sizes: tuple[int, int] | None = None) -> Shares:
    """Sort the (token, choice) pairs by expert into shares and blocks.

    Args:
        indices: [T, k] int32, the experts each token selected, different within a token. E stands for no expert here.
        num_experts: E.
        sizes: (C, b), b at most C, or there may be too few blocks; None for those of `sizes_for`.

    Returns:
        The plan, with N = k (T - C + b - 1) // b blocks: as many as there can be, when all tokens choose the same.
    """
    tokens, choices = indices.shape
    pairs = indices.size
    size, block = sizes or sizes_for(tokens, choices, num_experts)
    order, expert, bounds = sorted_pairs(indices.reshape(-1), num_experts)
    start, count = bounds[:-1], jnp.diff(bounds)

    def pair_of(expert: jax.Array, rank: jax.Array) -> jax.Array:
        pair = fetch(order, jnp.minimum(start[expert] + rank, pairs - 1))
        return jnp.where(rank < count[expert], pair, pairs)

    share = pair_of(jnp.arange(num_experts)[:, None], jnp.arange(size)[None])
    rank = jnp.arange(pairs, dtype=jnp.int32) - fetch(bounds, expert)
    place = jnp.where((rank < size) & (expert < num_experts), expert * size + rank, num_experts * size)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(place, unique_indices=True)

    blocks = (jnp.maximum(count - size, 0) + block - 1) // block
    ends = jnp.cumsum(blocks)
    number = jnp.arange(choices * max(0, tokens - size + block - 1) // block if tokens > size else 0, dtype=jnp.int32)
    rest_expert = jnp.minimum(jnp.searchsorted(ends, number, side="right"), num_experts - 1).astype(jnp.int32)
    first = size + (number - (ends - blocks)[rest_expert]) * block  # rank of a block's first row
    rest = pair_of(rest_expert[:, None], first[:, None] + jnp.arange(block)[None])
    rest = jnp.where(number[:, None] < ends[-1], rest, pairs)
    return Shares(share, place.reshape(tokens, choices), rest, rest_expert, ends[-1])
