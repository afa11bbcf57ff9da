"""The attention MoE's linear map on a TPU: rows in blocks of one expert, times its matrix and the shared one.

Both kernels walk the blocks once for every tile of their output's columns, with the expert's part of the matrix fetched
ahead of use. Of a block that pairs fill to no more than a half, half is computed. Unused halves and blocks at the end
are written as zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch.api import Dispatch
from pallas_kernels.dispatch.blocks import as_row, dot, dot_transposed, filled, for_filled_rows, prefetched, zero_unless
from pallas_kernels.dispatch.stream import Stream, Walk, compile_for
from pallas_kernels.tiles import Generation


def forward(
    rows: jax.Array, routed: jax.Array, shared: jax.Array, plan: Dispatch, *, tile: int, target: Generation
) -> jax.Array:
    """x (W_e + W_shared) of every row, W_e of its block's expert; the sum is made once an expert, on the chip.

    Args:
        rows: [N b, a], compute dtype.
        routed: [G, a, b'].
        shared: [a, b'].
        plan: the blocks; N is a multiple of the target's cores.
        tile: columns of b' worked on at a time.
        target: what is compiled for.

    Returns:
        [N b, b'], undefined in unused blocks but the last (see `dispatch.stream.Walk`).
    """
    _, inward, outward = routed.shape
    grid = Grid(plan, target, outward // tile)
    part = jax.ShapeDtypeStruct((1, inward, tile), routed.dtype)
    return pl.pallas_call(
        functools.partial(_forward_kernel, grid=grid, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid.shape,
            in_specs=[
                grid.rows(inward),
                pl.BlockSpec((inward, tile), lambda core, t, *_: (0, t)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=grid.tiled(tile, out=True),
            scratch_shapes=[*Stream.scratch([part]), pltpu.VMEM((inward, tile), routed.dtype)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], outward), rows.dtype),
        cost_estimate=_cost(rows, routed, 1),
        name="expert_linear_forward",
        **compile_for(target, sequential=2),
    )(*prefetched(plan, 0), filled(plan), rows, shared, routed)


def input_gradient(
    d_rows: jax.Array,
    rows: jax.Array,
    routed: jax.Array,
    shared: jax.Array,
    plan: Dispatch,
    first_block: jax.Array | int,
    *,
    tile: int,
    target: Generation,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the rows and of the score, without the factor of the score.

    Args:
        d_rows: the cotangent of each row's token, [N b, b'], or those of n depths kept side by side, [n N b, b'].
        rows: [N b, a].
        routed, shared, plan, target: as of `forward`.
        first_block: where this depth's blocks begin in d_rows.
        tile: columns of a worked on at a time.

    Returns:
        g W_e^T + g W_shared^T [N b, a]; <x, g W_e^T> [N, b] float32, which is all the score may see; undefined in
        padding slots.
    """
    _, inward, outward = routed.shape
    grid = Grid(plan, target, inward // tile)
    part = jax.ShapeDtypeStruct((1, tile, outward), routed.dtype)
    d_x, d_score = pl.pallas_call(
        functools.partial(_input_gradient_kernel, grid=grid, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid.shape,
            in_specs=[
                grid.rows(outward, aside=True),
                grid.tiled(tile),
                pl.BlockSpec((tile, outward), lambda core, t, *_: (t, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[grid.tiled(tile, out=True), grid.scores()],
            scratch_shapes=Stream.scratch([part]),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct((inward // tile, grid.blocks, 1, grid.block), jnp.float32),
        ],
        cost_estimate=_cost(rows, routed, 2),
        name="expert_linear_input_gradient",
        **compile_for(target, sequential=2),
    )(*prefetched(plan, first_block), filled(plan), d_rows, rows, shared, routed)
    return d_x, jnp.sum(d_score, axis=0)[:, 0]


def _forward_kernel(experts, ends, used, fill, x_ref, shared_ref, routed_hbm, y_ref, *scratch, grid, tile):
    routed_buffer, semaphores, place_ref, folded_ref = scratch
    walk = grid.walk(used)
    columns = pl.ds(pl.multiple_of(pl.program_id(1) * tile, tile), tile)
    stream = Stream((routed_hbm,), (routed_buffer,), semaphores, place_ref, (slice(None), columns))

    @pl.when(walk.active)
    def _():
        buffer, new = stream.at(walk, experts, ends)

        @pl.when(new)
        def _():
            folded_ref[...] = routed_buffer[buffer] + shared_ref[...]

        def compute(rows):
            y_ref[:rows] = dot(x_ref[:rows], folded_ref[...]).astype(y_ref.dtype)

        for_filled_rows(fill, walk.block, grid.block, compute, y_ref)

    zero_unless(walk.active, y_ref)


def _input_gradient_kernel(
    experts, ends, used, fill, d_ref, x_ref, shared_ref, routed_hbm, d_x_ref, d_score_ref, *scratch, grid, tile
):
    routed_buffer, semaphores, place_ref = scratch
    walk = grid.walk(used)
    part = pl.ds(pl.multiple_of(pl.program_id(1) * tile, tile), tile)
    stream = Stream((routed_hbm,), (routed_buffer,), semaphores, place_ref, (part,))

    @pl.when(walk.active)
    def _():
        buffer, _ = stream.at(walk, experts, ends)

        def compute(rows):
            d_out = d_ref[:rows]
            through_routed = dot_transposed(d_out, routed_buffer[buffer])
            score = jnp.sum(through_routed * x_ref[:rows].astype(jnp.float32), axis=1, keepdims=True)
            d_score_ref[0, 0, :, :rows] = as_row(score)
            d_x_ref[:rows] = (through_routed + dot_transposed(d_out, shared_ref[...])).astype(d_x_ref.dtype)

        for_filled_rows(fill, walk.block, grid.block, compute, d_x_ref)

    zero_unless(walk.active, d_x_ref, d_score_ref)


class Grid:
    """Cores, then tiles of columns, then each core's steps over its share of the blocks."""

    def __init__(self, plan: Dispatch, target: Generation, tiles: int) -> None:
        self.blocks, self.block = plan.source.shape
        self.cores = target.cores
        self.shape = (self.cores, tiles, self.blocks // self.cores)

    def walk(self, used, core=None, step=None) -> Walk:
        core = pl.program_id(0) if core is None else core
        step = pl.program_id(2) if step is None else step
        return Walk(used[0], self.blocks, self.cores, core, step)

    def rows(self, width, aside=False) -> pl.BlockSpec:
        """Whole rows of [N b, width], or of rows kept aside, from the block on that `used` names second."""

        def index(core, tile_index, step, experts, ends, used, *_):
            return (used[1] if aside else 0) + self.walk(used, core, step).source, 0

        return pl.BlockSpec((self.block, width), index)

    def tiled(self, tile, out=False) -> pl.BlockSpec:
        """A tile's columns of [N b, tiles * tile]."""

        def index(core, tile_index, step, experts, ends, used, *_):
            walk = self.walk(used, core, step)
            return (walk.block if out else walk.source), tile_index

        return pl.BlockSpec((self.block, tile), index)

    def of_expert(self, tile) -> pl.BlockSpec:
        """A tile's columns of [G, 1, tiles * tile]: what the block's expert has."""

        def index(core, tile_index, step, experts, ends, used, *_):
            return experts[self.walk(used, core, step).source], 0, tile_index

        return pl.BlockSpec((1, 1, tile), index)

    def scores(self) -> pl.BlockSpec:
        """Of [tiles, N, 1, b]."""
        return pl.BlockSpec((1, 1, 1, self.block), lambda c, t, i, *at: (t, self.walk(at[2], c, i).block, 0, 0))


def _cost(rows, routed, products):
    flops = 2 * products * rows.shape[0] * routed.shape[1] * routed.shape[2]
    moved = rows.shape[0] * (routed.shape[1] + routed.shape[2]) + routed.size
    return pl.CostEstimate(flops=flops, bytes_accessed=moved * rows.dtype.itemsize, transcendentals=0)
