"""What both kernels of depth attention over a window are made of: only slots that are seen are fetched, one by one.

They are s apart, and begin anywhere, so they aren't blocks of the cache as Pallas' own pipeline would fetch them. Each
core takes its blocks of tokens one after another, and fetches by hand what the next one sees while it works on this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.layout import Layout, for_tokens
from pallas_kernels.depth_attention.shapes import near_blocks
from pallas_kernels.depth_attention.window import Window


class NearLayout(Layout):
    """How they cut their arguments. The grid: cores, a core's blocks of tokens and key heads.

    Attributes:
        slots: of the cache.
        most: depths that are seen beside a token's own.
        dilation: s.
    """

    def __init__(self, q: jax.Array, k: jax.Array, cache: DepthCache, window: Window, backward: bool = False) -> None:
        super().__init__(q, k, cache, backward)
        self.blocks = near_blocks(cache, self.group, window, self.tiles, backward)
        self.token_blocks = q.shape[0] // self.blocks.tokens
        self.slots, self.dilation = cache.keys.shape[0], window.dilation
        self.most = window.most(self.slots) - 1
        self.cores = math.gcd(self.token_blocks * self.kv_heads, self.tiles.cores)
        self.steps = self.token_blocks * self.kv_heads // self.cores

    def at(self, *step: Any) -> tuple[Any, Any]:
        """See the base class."""
        block = step[0] * self.steps + step[1]
        return jax.lax.div(block, self.kv_heads), jax.lax.rem(block, self.kv_heads)

    def seen(self, others: jax.Array) -> jax.Array:
        """How many of so many shallower depths a depth sees; or of deeper ones, how many see it."""
        return jnp.minimum(self.most, others // self.dilation)

    def below(self, depth: Any) -> Callable[[Any], Any]:
        """n -> the n-th slot of the cache that is seen at `depth`."""
        return lambda n: jax.lax.rem(depth - (n + 1) * self.dilation, self.slots)

    def buffers(self, arrays: Sequence[jax.Array], turned: bool = False) -> list[Any]:
        """Scratch of `Fetched` for these arrays: two buffers each, and their semaphores."""

        def buffer(array):
            width = array.shape[1 if turned else 2] // self.kv_heads
            part = (width, self.blocks.tokens) if turned else (self.blocks.tokens, width)
            return pltpu.VMEM((2, max(self.most, 1), *part), array.dtype)

        return [*map(buffer, arrays), pltpu.SemaphoreType.DMA((2,))]

    def compile(self) -> dict[str, Any]:
        """See the base class."""
        vmem = self.target.vmem if self.target else None
        semantics = (pltpu.PARALLEL, pltpu.ARBITRARY)
        return {
            "compiler_params": pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem),
            "interpret": False if self.target else pltpu.InterpretParams(),
        }


class Fetched:
    """The seen slots of arrays in HBM, for one block of tokens after another.

    Attributes:
        parts: references to the present block's slots, [most, tokens, columns] of each array (or turned); `count` are
            there.

    Args:
        layout: of the kernel.
        arrays: references to [L, T, kv columns] each.
        buffers: as of `NearLayout.buffers`: [2, most, tokens, columns] each, and the semaphores.
        count: int32, slots that are seen.
        slot_of: n -> the n-th of them.
        turned: the arrays are [L, kv columns, T].
    """

    def __init__(
        self,
        layout: NearLayout,
        arrays: Sequence[Any],
        buffers: Sequence[Any],
        count: jax.Array,
        slot_of: Callable[[Any], Any],
        turned: bool = False,
    ) -> None:
        self.layout, self.arrays, self.count, self.slot_of, self.turned = layout, arrays, count, slot_of, turned
        *self.buffers, self.semaphores = buffers
        self.parts = [buffer.at[jax.lax.rem(pl.program_id(1), 2)] for buffer in self.buffers]

    def ahead(self) -> None:
        """Have the next block of tokens fetched, and this one if it is a core's first."""
        core, step = pl.program_id(0), pl.program_id(1)
        pl.when(step == 0)(lambda: self._each(core, step, "start"))
        pl.when(step + 1 < self.layout.steps)(lambda: self._each(core, step + 1, "start"))

    def wait(self) -> None:
        """Until the present block's slots are there."""
        self._each(pl.program_id(0), pl.program_id(1), "wait")

    def for_seen(self, body: Callable[[Any, Any], None]) -> None:
        """body(tokens, indices n) over the slots that are there: whole pieces of them, then the rest together."""
        blocks = self.layout.blocks
        pieces = jax.lax.div(self.count, blocks.slots)
        rest = self.count - pieces * blocks.slots

        def some(piece, size):
            for_tokens(blocks, lambda tokens: body(tokens, [piece * blocks.slots + i for i in range(size)]))

        def whole(piece, carry):
            some(piece, blocks.slots)
            return carry

        if self.layout.most:
            jax.lax.fori_loop(0, pieces, whole, 0)
        for size in range(1, blocks.slots):
            pl.when(rest == size)(functools.partial(some, pieces, size))

    def _each(self, core, step, action):
        tokens = self.layout.blocks.tokens
        block, head = self.layout.at(core, step)
        rows, place = pl.ds(pl.multiple_of(block * tokens, tokens), tokens), jax.lax.rem(step, 2)

        def one(n, carry):
            slot = self.slot_of(n)
            for array, buffer in zip(self.arrays, self.buffers, strict=True):
                width = buffer.shape[2 if self.turned else 3]
                columns = pl.ds(pl.multiple_of(head * width, width), width) if self.layout.kv_heads > 1 else slice(None)
                source = array.at[slot, columns, rows] if self.turned else array.at[slot, rows, columns]
                getattr(pltpu.make_async_copy(source, buffer.at[place, n], self.semaphores.at[place]), action)()
            return carry

        if self.layout.most:
            jax.lax.fori_loop(0, self.count, one, 0)


HBM = pl.BlockSpec(memory_space=pl.ANY)
