"""Where the positions of rows lie in a memory: in rows of their own, or in pages that a table hands out.

A memory is [N, B, S, ...]: N depths, B rows, S positions. In pages it is [N, pages, size, ...] with a table [B, M] of
page numbers: position p of row b is in page table[b, p // size], at p % size, at all depths alike. A number that isn't
a page's stands for a page that isn't there: what is written there is dropped, and what is read there has no meaning,
as behind the end of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def place(table: jax.Array | None, memory: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of positions [B, ...] in the second and third axis of a memory; out of range for a page that isn't there.

    Args:
        table: [B, M] int32; None where rows are rows.
        memory: [N, B, S, ...], or in pages.
        positions: [B, ...] int32.
    """
    rows = jnp.arange(positions.shape[0]).reshape(-1, *[1] * (positions.ndim - 1))
    if table is None:
        return rows, positions
    pages, size = memory.shape[1:3]
    number = positions // size
    page = jnp.where(number < table.shape[1], table[rows, jnp.minimum(number, table.shape[1] - 1)], pages)
    return page, positions % size


def length(table: jax.Array | None, memory: jax.Array) -> int:
    """S: positions that a row can have."""
    return memory.shape[2] * (1 if table is None else table.shape[1])


def joined(pages: jax.Array, axis: int) -> jax.Array:
    """[..., M, size, ...] -> [..., M size, ...], M being at `axis`."""
    return pages.reshape(*pages.shape[:axis], -1, *pages.shape[axis + 2 :])


def flat(heads: jax.Array, width: int = 0) -> jax.Array:
    """[..., kv, d] with all heads of a position side by side, and zeros behind them up to a width, or to whole tiles of
    a TPU: heads that fill no tile by themselves would have it lay a memory out anew in every program."""
    size = heads.shape[-2] * heads.shape[-1]
    width = width or -(-size // 128) * 128
    missing = [(0, 0)] * (heads.ndim - 2) + [(0, width - size)]
    return jnp.pad(heads.reshape(*heads.shape[:-2], size), missing)


def heads_of(read: jax.Array, kv_heads: int, size: int) -> jax.Array:
    """The way back: the heads [..., kv, d] of what was read of a memory that is `flat`."""
    return read[..., : kv_heads * size].reshape(*read.shape[:-1], kv_heads, size)


def rows_of(table: jax.Array | None, memory: jax.Array) -> jax.Array:
    """A whole memory as [N, B, S, ...]."""
    return memory if table is None else joined(memory[:, table], 2)
