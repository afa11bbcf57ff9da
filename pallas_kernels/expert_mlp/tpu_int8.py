"""The expert MLP on a TPU with matrices in eight bits: forward only, for decoding, which waits for weights.

Half the bytes of bfloat16 come from HBM; on the chip they become the rows' dtype, and a product's sums get the scale of
their output.
"""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch.api import Dispatch
from pallas_kernels.dispatch.blocks import dot, dot_transposed, prefetched, zero_unless
from pallas_kernels.dispatch.stream import Stream, compile_for
from pallas_kernels.expert_mlp.tpu import Places
from pallas_kernels.tiles import Generation
from pallas_kernels.weights import OutputColumns, OutputRows


def forward(
    rows: jax.Array, gate_up: OutputRows, down: OutputColumns, plan: Dispatch, *, target: Generation
) -> jax.Array:
    """W_down(silu(W_gate x) * (W_up x)) of every row, by its block's expert.

    Args:
        rows: [N b, h], compute dtype.
        gate_up: of [E, 2F, h].
        down: of [E, F, h].
        plan: the blocks; N is a multiple of the target's cores.
        target: what is compiled for.

    Returns:
        [N b, h], undefined in unused blocks but the last (see `dispatch.stream.Walk`).
    """
    assert gate_up.scales is not None and down.scales is not None
    size, hidden = down.shape[1:]
    place = Places(plan, target)
    matrices = [gate_up.matrices.reshape(-1, 2, size, hidden), down.matrices]
    return pl.pallas_call(
        functools.partial(_kernel, place=place),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=place.grid,
            in_specs=[
                place.rows(hidden),
                place.of_expert(2, size),
                place.of_expert(1, hidden),
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            ],
            out_specs=place.rows(hidden, out=True),
            scratch_shapes=Stream.scratch(matrices),
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        name="expert_mlp_int8",
        **compile_for(target),
    )(*prefetched(plan, 0), rows, gate_up.scales.reshape(-1, 2, size), down.scales[:, None], *matrices)


def _kernel(experts, ends, used, x_ref, gate_up_scale, down_scale, gate_up_hbm, down_hbm, y_ref, *scratch, place):
    gate_up_buffer, down_buffer, semaphores, buffer_ref = scratch
    walk = place.walk(pl.program_id(0), pl.program_id(1), used)
    stream = Stream((gate_up_hbm, down_hbm), (gate_up_buffer, down_buffer), semaphores, buffer_ref)

    @pl.when(walk.active)
    def _():
        buffer, _ = stream.at(walk, experts, ends)
        x = x_ref[...]
        gate, up = (
            dot_transposed(x, gate_up_buffer[buffer, n].astype(x.dtype)) * gate_up_scale[0, n : n + 1] for n in (0, 1)
        )
        activation = (gate * jax.nn.sigmoid(gate) * up).astype(x.dtype)
        y = dot(activation, down_buffer[buffer].astype(x.dtype)) * down_scale[0]
        y_ref[...] = y.astype(y_ref.dtype)

    zero_unless(walk.active, y_ref)
