"""What the kernels over blocks of rows do with a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch.api import Dispatch

FEWEST = 16
"""The least rows of a half: a tile of bfloat16."""
TRANSPOSED = (((1,), (1,)), ((), ()))


def zero_unless(active: jax.Array, *refs: Any) -> None:
    """Zeros into the references' whole blocks where a grid step has no work."""

    @pl.when(jnp.logical_not(active))
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


def half_of(block: int) -> int:
    """The rows that a block's product takes where no more are filled: half of them, or all where half is too few."""
    return block // 2 if block >= 2 * FEWEST else block


def for_filled_rows(fill: Any, at: jax.Array, block: int, compute: Callable[[int], None], *refs: Any) -> None:
    """Calls `compute` with how many of the block's first rows there are to work on: all, or half if pairs fill no more.

    Args:
        fill: [N] int32 in SMEM, of `filled`.
        at: the block.
        block: b.
        compute: writes these rows of the outputs; called twice where a program has both ways, of which one runs.
        refs: outputs, whose other half is filled with zeros; rows before the last dimension.
    """
    half = half_of(block)
    if half == block:
        compute(block)
        return
    whole = fill[at] > half
    pl.when(whole)(lambda: compute(block))

    @pl.when(jnp.logical_not(whole))
    def _():
        compute(half)
        for ref in refs:
            rest = (*[slice(None)] * (len(ref.shape) - 2), pl.ds(half, block - half))
            ref[rest] = jnp.zeros((*ref.shape[:-2], block - half, ref.shape[-1]), ref.dtype)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[m, k], [k, n] -> [m, n] float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=_precision(a))


def dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """[m, k], [n, k] -> [m, n] float32."""
    return jax.lax.dot_general(a, b, TRANSPOSED, preferred_element_type=jnp.float32, precision=_precision(a))


def _precision(a):
    """Float32 arguments are multiplied as float32: they are for checks, not for speed."""
    return "highest" if a.dtype == jnp.float32 else None


def _diagonal(size):
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), 0) == jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)


def as_column(row: jax.Array) -> jax.Array:
    """[1, b] -> [b, 1], by a masked sum: a handful of operations where a transpose takes a relayout."""
    size = row.shape[1]
    return jnp.sum(jnp.where(_diagonal(size), jnp.broadcast_to(row, (size, size)), 0.0), axis=1, keepdims=True)


def as_row(column: jax.Array) -> jax.Array:
    """[b, 1] -> [1, b]."""
    size = column.shape[0]
    return jnp.sum(jnp.where(_diagonal(size), jnp.broadcast_to(column, (size, size)), 0.0), axis=0, keepdims=True)


def filled(plan: Dispatch) -> jax.Array:
    """Pairs of each block [N] int32; they have its first slots. One more scalar of a walk."""
    return jnp.sum(plan.source < plan.slot.size, axis=1, dtype=jnp.int32)


def prefetched(plan: Dispatch, first_block: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scalars of a walk: each block's expert [N], each expert's end [E], and (blocks used, `first_block`)."""
    used = jnp.stack([plan.used_blocks, jnp.asarray(first_block, jnp.int32)])
    return plan.block_expert, plan.first_block + plan.num_blocks, used
