"""What the kernels over blocks of rows do with a block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch.api import Dispatch

TRANSPOSED = (((1,), (1,)), ((), ()))


def zero_unless(active: jax.Array, *refs: Any) -> None:
    """Zeros into the references' whole blocks where a grid step has no work."""

    @pl.when(jnp.logical_not(active))
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


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


def prefetched(plan: Dispatch, first_block: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scalars of a walk: each block's expert [N], each expert's end [E], and (blocks used, `first_block`)."""
    used = jnp.stack([plan.used_blocks, jnp.asarray(first_block, jnp.int32)])
    return plan.block_expert, plan.first_block + plan.num_blocks, used
