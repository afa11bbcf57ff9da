"""Experts computed where their weights lie, expert after expert in a loop: a CPU's form for decoding, forward only.

Gathering the weights first, as batched products need, costs several times more than the products themselves
(docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.api import blocks_of, plan_dispatch, rows_of
from pallas_kernels.weights import at

BLOCKED = 8
"""Mean rows of an expert from which on they are computed in blocks; below, one by one."""
LARGEST_BLOCK = 64


def by_expert(
    x: jax.Array,
    indices: jax.Array,
    num_experts: int,
    among: int,
    size: int,
    expert: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """What the selected experts [T, k] make of each row [T, a]: [T, k, size].

    `expert` takes rows [b, a] and the number of their expert to [b, size]. In bfloat16 it gets and gives float32: XLA's
    CPU backend looks up and writes no row in bfloat16, and would convert all of them for each.
    """
    if x.dtype == jnp.bfloat16:
        return by_expert(x.astype(jnp.float32), indices, num_experts, among, size, expert).astype(x.dtype)
    tokens, active = indices.shape
    mean = indices.size // among
    if mean < BLOCKED:
        return _row_by_row(x, indices, num_experts, size, expert)
    plan = plan_dispatch(indices, num_experts, block_for(mean))
    rows = blocks_of(x, plan)  # [N, b, a]

    def block(n: jax.Array, out: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(out, expert(at(rows, n), plan.block_expert[n]), n, 0)

    empty = jnp.zeros((*rows.shape[:2], size), x.dtype)
    found = rows_of(jax.lax.fori_loop(0, plan.used_blocks, block, empty), plan).reshape(tokens, active, size)
    # A pair without an expert has a padding slot, which may hold what an expert made of another token.
    return jnp.where((indices < num_experts)[..., None], found, 0)


def block_for(mean: int) -> int:
    """Rows of a block where an expert has so many on average."""
    return min(LARGEST_BLOCK, 1 << (mean - 1).bit_length())


def _row_by_row(x: jax.Array, indices: jax.Array, num_experts: int, size: int, expert: Callable) -> jax.Array:
    """`by_expert` for few rows. Those of one expert come one after the other: its weights stay in the cache."""
    tokens, active = indices.shape
    flat = indices.reshape(-1)
    if flat.size == 1:
        return _one_row(x, flat[0], num_experts, size, expert)[None]
    order = jnp.argsort(flat)  # pairs without an expert come last

    def pair(n: jax.Array, out: jax.Array) -> jax.Array:
        row = at(order, n)
        value = expert(at(x, row // active)[None], at(flat, row))
        return jax.lax.dynamic_update_index_in_dim(out, value, row, 0, allow_negative_indices=False)

    out = jax.lax.fori_loop(0, jnp.sum(flat < num_experts), pair, jnp.zeros((flat.size, size), x.dtype))
    return out.reshape(tokens, active, size)


def _one_row(x: jax.Array, index: jax.Array, num_experts: int, size: int, expert: Callable) -> jax.Array:
    """What an expert makes of a row [1, a]: [1, size]; zero without an expert.

    In a loop that is taken once: XLA's CPU backend would fuse whatever made the row into the product, and then multiply
    number by number, up to ten times slower (docs/benchmarks.md). The expert is the loop's own number, for else XLA
    would take the product out of it.
    """
    end = jnp.minimum(index + 1, num_experts)
    return jax.lax.fori_loop(index, end, lambda e, _: expert(x, e), jnp.zeros((1, size), x.dtype))
