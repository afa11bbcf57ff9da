"""The attention MoE's linear map on a TPU with matrices in eight bits: forward only, shared experts folded in."""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_moe.tpu import Grid
from pallas_kernels.dispatch.api import Dispatch
from pallas_kernels.dispatch.blocks import dot, prefetched, zero_unless
from pallas_kernels.dispatch.stream import Stream, compile_for
from pallas_kernels.tiles import Generation
from pallas_kernels.weights import OutputColumns


def forward(rows: jax.Array, routed: OutputColumns, plan: Dispatch, *, tile: int, target: Generation) -> jax.Array:
    """W_e x of every row, by its block's expert.

    Args:
        rows: [N b, a], compute dtype.
        routed: of [G, a, b'].
        plan: the blocks; N is a multiple of the target's cores.
        tile: columns of b' worked on at a time.
        target: what is compiled for.

    Returns:
        [N b, b'], undefined in unused blocks but the last (see `dispatch.stream.Walk`).
    """
    assert routed.scales is not None
    _, inward, outward = routed.shape
    grid = Grid(plan, target, outward // tile)
    part = jax.ShapeDtypeStruct((1, inward, tile), routed.matrices.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, grid=grid, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid.shape,
            in_specs=[grid.rows(inward), grid.of_expert(tile), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=grid.tiled(tile, out=True),
            scratch_shapes=Stream.scratch([part]),
        ),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], outward), rows.dtype),
        name="expert_linear_int8",
        **compile_for(target, sequential=2),
    )(*prefetched(plan, 0), rows, routed.scales[:, None], routed.matrices)


def _kernel(experts, ends, used, x_ref, scale_ref, routed_hbm, y_ref, *scratch, grid, tile):
    routed_buffer, semaphores, place_ref = scratch
    walk = grid.walk(used)
    columns = pl.ds(pl.multiple_of(pl.program_id(1) * tile, tile), tile)
    stream = Stream((routed_hbm,), (routed_buffer,), semaphores, place_ref, (slice(None), columns))

    @pl.when(walk.active)
    def _():
        buffer, _ = stream.at(walk, experts, ends)
        x = x_ref[...]
        y = dot(x, routed_buffer[buffer].astype(x.dtype)) * scale_ref[0]
        y_ref[...] = y.astype(y_ref.dtype)

    zero_unless(walk.active, y_ref)
