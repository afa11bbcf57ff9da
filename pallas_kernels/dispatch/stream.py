"""How the grouped kernels walk over blocks: a half for each core, each expert's matrices fetched one expert ahead.

Pallas' own pipeline fetches the next grid step's blocks during the present step. An expert's matrices are needed
every few steps only, so its fetch would have to fit into the one step before: here it has all the steps of the
expert before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tiles import INTERPRETED, Generation


class Walk:
    """Which block a grid step works on: `used` blocks shared evenly by the cores; steps beyond a share are idle.

    All idle steps of a core have one unused block, so that outputs are written once for them, not for every unused
    block. That of the last core is the last block of all: what is written there, zeros, is what slots that no expert
    fills are read from. Other unused blocks of an output are undefined.

    Args:
        used: scalar int32, blocks that hold rows; they come first.
        total: N, static; a multiple of `cores`.
        cores: extent of the grid's first, parallel dimension; the second has N / cores steps.
        core, step: the place in the grid.
    """

    def __init__(self, used: jax.Array, total: int, cores: int, core: jax.Array, step: jax.Array) -> None:
        share = pl.cdiv(used, cores)
        rest = total // cores - share
        self.first = core * share
        self.end = jnp.minimum(self.first + share, used)
        working = step < share
        self.block = jnp.where(working, self.first + step, cores * share + (core + 1) * rest - 1)
        self.active = working & (self.block < self.end)
        # Steps without work stay on the last block that had some, so that nothing is fetched for them.
        self.source = jnp.where(self.active, self.block, jnp.maximum(self.end - 1, 0))


class Stream:
    """Matrices of one expert after another, in two alternating buffers.

    Args:
        arrays: references to the [E, ...] arrays in HBM.
        buffers: scratch references [2, ...], one an array.
        semaphores: DMA semaphores [2, number of arrays].
        place: SMEM scratch [1] int32, the buffer in use.
        part: what of an expert's matrices is wanted, all of it by default.
    """

    def __init__(
        self, arrays: Sequence[Any], buffers: Sequence[Any], semaphores: Any, place: Any, part: tuple[Any, ...] = ()
    ) -> None:
        self.arrays, self.buffers, self.semaphores, self.place = arrays, buffers, semaphores, place
        self.part = part

    def _copies(self, expert, place):
        for i, (array, buffer) in enumerate(zip(self.arrays, self.buffers, strict=True)):
            source = array.at[(expert, *self.part)]
            yield pltpu.make_async_copy(source, buffer.at[place], self.semaphores.at[place, i])

    def at(self, walk: Walk, experts: Any, ends: Any) -> tuple[jax.Array, jax.Array]:
        """The buffer that holds the matrices of this block's expert, and whether they are new; call when active.

        Args:
            walk: where this grid step is.
            experts: [N] int32 in SMEM, the expert of each block, ascending.
            ends: [E] int32 in SMEM, the block after each expert's last.
        """
        block = walk.block
        expert = experts[block]
        starts = block == walk.first
        new = starts | (experts[jnp.maximum(block - 1, 0)] != expert)

        @pl.when(new)
        def _():
            place = jnp.where(starts, 0, 1 - self.place[0])
            self.place[0] = place

            @pl.when(starts)
            def _():
                for copy in self._copies(expert, place):
                    copy.start()

            for copy in self._copies(expert, place):
                copy.wait()
            following = ends[expert]

            @pl.when(following < walk.end)
            def _():
                for copy in self._copies(experts[following], 1 - place):
                    copy.start()

        return self.place[0], new

    @staticmethod
    def scratch(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[Any]:
        """Scratch shapes for `arrays` [E, ...], or the parts of them: the buffers, the semaphores, the place."""
        buffers = [pltpu.VMEM((2, *array.shape[1:]), array.dtype) for array in arrays]
        return [*buffers, pltpu.SemaphoreType.DMA((2, len(arrays))), pltpu.SMEM((1,), jnp.int32)]


def compile_for(target: Generation, sequential: int = 1) -> dict[str, Any]:
    """Arguments of `pallas_call` for a grid of a parallel and `sequential` other dimensions."""
    interpreted = target is INTERPRETED
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, *[pltpu.ARBITRARY] * sequential),
            vmem_limit_bytes=None if interpreted else target.vmem,
        ),
        "interpret": pltpu.InterpretParams() if interpreted else False,
    }
