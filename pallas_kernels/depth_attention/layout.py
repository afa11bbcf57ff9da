"""What the kernels of depth attention are made of: how they cut their arguments, and loops over tokens and slots.

They cut the tokens into blocks, which is what the cores of a megacore share, and walk the slots of a block of tokens.
Only slots that are wanted are looked at, so that nothing is read that wasn't written.

Inside a kernel everything lies *turned*, [d, tokens]: tokens in lanes. The sum over d, of which there is one for every
token, slot and head, then is a vector unit's plain addition, and the softmax of 128 tokens takes one register. With d
in lanes the cross-lane unit would have to add up each of them. It turns a block of keys once for all heads of a group.
"""

from __future__ import annotations

import functools
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
        self.blocks = Blocks.of(cache, self.group, self.tiles, backward)
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

    def turned_slots_of(self, rows: int, index: Callable[..., Any]) -> pl.BlockSpec:
        """A block of slots of [L, heads times rows, T]; `index` as for `slots_of`."""

        def turned(*step):
            slot, i, h = index(*step)
            return slot, h, i

        return pl.BlockSpec((self.blocks.slots, rows, self.blocks.tokens), turned)

    def turned_slot(self, rows: int) -> pl.BlockSpec:
        """The slot that the first prefetched scalar names, of the same."""

        def index(*step):
            i, h = self.at(*step[:-1])
            return step[-1][0], h, i

        return pl.BlockSpec((None, rows, self.blocks.tokens), index)

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


def turned(ref: Any, *place: Any) -> jax.Array:
    """A part [tokens, d] of what a reference has, as [d, tokens]."""
    return jnp.transpose(ref[place])


def columns_of(head: int, size: int) -> slice:
    """Of one head, where heads lie side by side."""
    return slice(head * size, (head + 1) * size)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Inner products of turned rows: [1, tokens]."""
    return jnp.sum(a * b, axis=0, keepdims=True)


def for_tokens(blocks: Blocks, body: Callable[[Any], None]) -> None:
    """body(slice of tokens) over a block of tokens, so that running sums stay in registers."""

    def one(n, carry):
        body(pl.ds(pl.multiple_of(n * blocks.rows, blocks.rows), blocks.rows))
        return carry

    jax.lax.fori_loop(0, blocks.tokens // blocks.rows, one, 0)


def for_slots(blocks: Blocks, count: Any, body: Callable[[Any, Any], None], last: bool = False) -> None:
    """body(slice of tokens, indices) for the first `count` slots of a block together, or for its last."""

    def together(size):
        wanted = range(blocks.slots - size, blocks.slots) if last else range(size)
        for_tokens(blocks, lambda tokens: body(tokens, wanted))

    for size in range(1, blocks.slots + 1):
        pl.when(count == size)(functools.partial(together, size))
