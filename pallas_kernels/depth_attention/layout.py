"""What both kernels of depth attention are made of: how they cut their arguments, and loops over rows and slots.

They cut the tokens into blocks, which is what the cores of a megacore share, and walk the slots of a block of tokens.
Blocks of slots that are all wanted take a path without masks; the others go slot by slot, so that nothing is read that
wasn't written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.shapes import LANES, Blocks
from pallas_kernels.tiles import INTERPRETED, generation

F32 = jnp.float32
PARALLEL = ("parallel", "parallel", "arbitrary")


class Layout:
    """How both kernels cut their arguments. The grid: blocks of tokens, key heads, blocks of slots."""

    def __init__(self, q: jax.Array, k: jax.Array, cache: DepthCache, backward: bool = False) -> None:
        self.size, self.group = head_size(k), q.shape[1] // k.shape[1]
        self.kv_heads = k.shape[1] // self.size
        self.target = generation()
        self.tiles = self.target or INTERPRETED
        self.blocks = Blocks.of(cache, self.tiles, backward)
        self.token_blocks = q.shape[0] // self.blocks.tokens

    def grid(self, steps: jax.Array) -> tuple[Any, ...]:
        """For that many blocks of slots, at run time."""
        return self.token_blocks, self.kv_heads, steps

    def at(self, *step: Any) -> tuple[Any, Any]:
        """The block of tokens and the key head that a step of the grid works on."""
        return step[0], step[1]

    def rows(self, columns: int) -> pl.BlockSpec:
        """Of [T, heads times columns]."""
        return pl.BlockSpec((self.blocks.tokens, columns), lambda *step: self.at(*step[:-1]))

    def slots_of(self, columns: int, index: Callable[..., Any]) -> pl.BlockSpec:
        """A block of slots of [L, T, heads times columns]."""
        return pl.BlockSpec((self.blocks.slots, self.blocks.tokens, columns), index)

    def slot(self, columns: int) -> pl.BlockSpec:
        """The slot that the first prefetched scalar names, of the same."""
        return pl.BlockSpec((None, self.blocks.tokens, columns), lambda *step: (step[-1][0], *self.at(*step[:-1])))

    def logs(self) -> pl.BlockSpec:
        """Of [kv, n/kv, T]."""

        def index(*step):
            i, h = self.at(*step[:-1])
            return h, 0, i

        return pl.BlockSpec((None, self.group, self.blocks.tokens), index)

    def statistics(self, lanes: int) -> pl.BlockSpec:
        """Of [kv, T, lanes]."""

        def index(*step):
            i, h = self.at(*step[:-1])
            return h, i, 0

        return pl.BlockSpec((None, self.blocks.tokens, lanes), index)

    def compile(self) -> dict[str, Any]:
        """The other arguments of `pallas_call`."""
        vmem = self.target.vmem if self.target else None
        return {
            "compiler_params": pltpu.CompilerParams(dimension_semantics=PARALLEL, vmem_limit_bytes=vmem),
            "interpret": self.target is None,
        }


def head_size(k: jax.Array) -> int:
    """d of keys [T, kv d]: a register's lanes, or less with a single head."""
    return min(LANES, k.shape[1])


def head_of(ref: Any, place: Any, head: int, size: int) -> jax.Array:
    """The rows of one head, float32: `place` is a slice of rows, or a slot and a slice."""
    place = place if isinstance(place, tuple) else (place,)
    return ref[(*place, slice(head * size, (head + 1) * size))].astype(F32)


def row_dot(a: jax.Array, b: jax.Array, minus: jax.Array | None = None) -> jax.Array:
    """Inner products of rows, less the sum of a row of `minus`, in one reduction if sizes agree: [rows, 1]."""
    product = a * b
    if minus is None:
        return jnp.sum(product, axis=-1, keepdims=True)
    if minus.shape == product.shape:
        return jnp.sum(product - minus, axis=-1, keepdims=True)
    return jnp.sum(product, axis=-1, keepdims=True) - jnp.sum(minus, axis=-1, keepdims=True)


def for_rows(blocks: Blocks, body: Callable[[Any], None]) -> None:
    """body(slice of rows) over a block of tokens, so that running sums stay in registers."""

    def one(n, carry):
        body(pl.ds(pl.multiple_of(n * blocks.rows, blocks.rows), blocks.rows))
        return carry

    jax.lax.fori_loop(0, blocks.tokens // blocks.rows, one, 0)


def for_slots(blocks: Blocks, first: Any, low: Any, high: Any, body: Callable[[Any, Any], None]) -> None:
    """body(rows, indices in the block) for the slots first .. first + blocks.slots - 1 that lie in low .. high - 1."""
    whole = (first >= low) & (first + blocks.slots <= high)

    @pl.when(whole)
    def together():
        for_rows(blocks, lambda rows: body(rows, range(blocks.slots)))

    @pl.when(jnp.logical_not(whole))
    def one_by_one():
        def one(i, carry):
            for_rows(blocks, lambda rows: body(rows, [i]))
            return carry

        jax.lax.fori_loop(jnp.maximum(low - first, 0), jnp.minimum(high - first, blocks.slots), one, 0)


def column_to_row(column: jax.Array) -> jax.Array:
    """[tokens, lanes], equal lanes -> [1, tokens]."""
    pieces = [jnp.transpose(column[n : n + LANES])[:1] for n in range(0, column.shape[0], LANES)]
    return jnp.concatenate(pieces, axis=1)


def row_to_column(row: jax.Array, lanes: int) -> jax.Array:
    """[1, tokens] -> [tokens, lanes], equal lanes."""
    pieces = [row[:, n : n + LANES] for n in range(0, row.shape[1], LANES)]
    return jnp.concatenate([jnp.transpose(jnp.broadcast_to(piece, (lanes, LANES))) for piece in pieces], axis=0)
