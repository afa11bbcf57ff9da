"""The fused expert MLP on a TPU: gate, up, SwiGLU and down of a block of rows without leaving the chip's memory.

Rows are in blocks of one expert (`dispatch`). Both kernels walk the blocks in order, each core over its half, with the
expert's three matrices fetched ahead of use. Of a block that pairs fill to no more than a half, which may be every
expert's last, half is computed. Unused halves and blocks at the end are written as zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch.api import Dispatch
from pallas_kernels.dispatch.blocks import (
    as_column,
    as_row,
    dot,
    dot_transposed,
    filled,
    for_filled_rows,
    prefetched,
    zero_unless,
)
from pallas_kernels.dispatch.stream import Stream, Walk, compile_for
from pallas_kernels.tiles import Generation


def forward(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, plan: Dispatch, *, keep: bool, target: Generation
) -> list[jax.Array]:
    """W_down(silu(W_gate x) * (W_up x)) of every row, by its block's expert.

    Args:
        rows: [N b, h], compute dtype.
        gate_up: [E, 2F, h].
        down: [E, F, h].
        plan: the blocks; N is a multiple of the target's cores.
        keep: also return what the backward pass wants.
        target: what is compiled for.

    Returns:
        values [N b, h], undefined in unused blocks but the last (see `dispatch.stream.Walk`), and, with `keep`, (gate,
        up) [2, N b, F], undefined also in a half of a block that no pair fills.
    """
    size, hidden = down.shape[1:]
    place = Places(plan, target)
    matrices = [gate_up.reshape(-1, 2, size, hidden), down]
    out_shapes = [_like(rows)]
    out_specs = [place.rows(hidden, out=True)]
    if keep:
        out_shapes.append(jax.ShapeDtypeStruct((2, rows.shape[0], size), rows.dtype))
        out_specs.append(place.stacked(2, size, out=True))
    return pl.pallas_call(
        functools.partial(_forward_kernel, place=place),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=place.grid,
            in_specs=[place.rows(hidden), *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=out_specs,
            scratch_shapes=Stream.scratch(matrices),
        ),
        out_shape=out_shapes,
        cost_estimate=_cost(rows, down, 3 if keep else 2),
        name="expert_mlp_forward",
        **compile_for(target),
    )(*prefetched(plan, 0), filled(plan), rows, *matrices)


def input_gradient(
    d_rows: jax.Array,
    kept: jax.Array,
    slot_weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    plan: Dispatch,
    aside: jax.Array | None,
    first_block: jax.Array | int,
    *,
    target: Generation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the rows and of their weights, and the factors of the weight gradient.

    Args:
        d_rows: the cotangent of each row's token, before the weight: [N b, h], or with `aside` [n N b, h].
        kept: gate and up [2, N b, F], as `forward` returned them; or the rows, of `d_rows`' shape, of which they are
            computed again: two products more, and neither is ever written to memory.
        slot_weights: [N, b] float32, zero in padding slots.
        gate_up, down, plan, target: as of `forward`.
        aside: [3, n N b, F], the factors of several depths, to which those of this one are written in place; or None.
        first_block: where this depth's blocks begin in d_rows and `aside`.

    Returns:
        d_x [N b, h]; d_weights [N, b] float32, undefined in padding slots; factors [3, N b, F], the gradients of gate
        and up and the weighted activation, zero in padding slots; with `aside`, its new value. Unused blocks are
        undefined.
    """
    size, hidden = down.shape[1:]
    place = Places(plan, target)
    matrices = [gate_up.reshape(-1, 2, size, hidden), down]
    again = kept.ndim == 2
    written = [] if aside is None else [aside]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [d_rows, kept, slot_weights[:, None], *matrices]
    rows = plan.source.size
    d_x = jax.ShapeDtypeStruct((rows, hidden), d_rows.dtype)
    d_weights = jax.ShapeDtypeStruct((plan.source.shape[0], 1, place.block), jnp.float32)
    factors = jax.ShapeDtypeStruct((3, rows, size), d_rows.dtype)
    d_x, d_weights, factors = pl.pallas_call(
        functools.partial(_input_gradient_kernel, place=place, aside=bool(written)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=place.grid,
            in_specs=[
                place.rows(hidden, aside=True),
                place.rows(hidden, aside=True) if again else place.stacked(2, size),
                place.weights(),
                *[hbm for _ in [*matrices, *written]],
            ],
            out_specs=[place.rows(hidden, out=True), place.weights(out=True), place.stacked(3, size, out=True)],
            scratch_shapes=Stream.scratch(matrices),
        ),
        out_shape=[d_x, d_weights, _like(aside) if written else factors],
        input_output_aliases={4 + len(inputs): 2} if written else {},
        cost_estimate=_cost(d_x, down, 5, products=5 if again else 3),
        name="expert_mlp_input_gradient",
        **compile_for(target),
    )(*prefetched(plan, first_block), filled(plan), *inputs, *written)
    return d_x, d_weights[:, 0], factors


def _forward_kernel(experts, ends, used, fill, x_ref, gate_up_hbm, down_hbm, *refs, place):
    y_ref, *kept, gate_up_buffer, down_buffer, semaphores, buffer_ref = refs
    walk = place.walk(pl.program_id(0), pl.program_id(1), used)
    stream = Stream((gate_up_hbm, down_hbm), (gate_up_buffer, down_buffer), semaphores, buffer_ref)

    @pl.when(walk.active)
    def _():
        buffer, _ = stream.at(walk, experts, ends)

        def compute(rows):
            x = x_ref[:rows]
            gate = dot_transposed(x, gate_up_buffer[buffer, 0])
            up = dot_transposed(x, gate_up_buffer[buffer, 1])
            activation = gate * jax.nn.sigmoid(gate) * up
            y_ref[:rows] = dot(activation.astype(x.dtype), down_buffer[buffer]).astype(y_ref.dtype)
            if kept:
                kept[0][0, :rows] = gate.astype(x.dtype)
                kept[0][1, :rows] = up.astype(x.dtype)

        for_filled_rows(fill, walk.block, place.block, compute, y_ref)

    zero_unless(walk.active, y_ref, *kept)


def _input_gradient_kernel(experts, ends, used, fill, d_ref, kept_ref, weight_ref, *refs, place, aside):
    gate_up_hbm, down_hbm, *refs = refs
    # What is kept aside is written, through the aliased output, and never read.
    d_x_ref, d_weight_ref, factor_ref, *refs = refs[1:] if aside else refs
    gate_up_buffer, down_buffer, semaphores, buffer_ref = refs
    walk = place.walk(pl.program_id(0), pl.program_id(1), used)
    stream = Stream((gate_up_hbm, down_hbm), (gate_up_buffer, down_buffer), semaphores, buffer_ref)

    @pl.when(walk.active)
    def _():
        buffer, _ = stream.at(walk, experts, ends)
        dtype = d_ref.dtype

        def compute(rows):
            d_activation = dot_transposed(d_ref[:rows], down_buffer[buffer])  # before the weight
            gate, up = (part.astype(jnp.float32) for part in _gate_and_up(kept_ref, rows, gate_up_buffer, buffer))
            sigmoid = jax.nn.sigmoid(gate)
            silu = gate * sigmoid
            activation = silu * up
            # d w = <W_down^T d_out, activation>: the values themselves needn't be kept.
            d_weight_ref[0, :, :rows] = as_row(jnp.sum(d_activation * activation, axis=1, keepdims=True))
            weight = as_column(weight_ref[0, :, :rows])
            d_activation = d_activation * weight
            d_gate = (d_activation * up * (sigmoid + silu * (1 - sigmoid))).astype(dtype)
            d_up = (d_activation * silu).astype(dtype)
            d_x = dot(d_gate, gate_up_buffer[buffer, 0]) + dot(d_up, gate_up_buffer[buffer, 1])
            d_x_ref[:rows] = d_x.astype(dtype)
            factor_ref[0, :rows] = d_gate
            factor_ref[1, :rows] = d_up
            factor_ref[2, :rows] = (activation * weight).astype(dtype)

        for_filled_rows(fill, walk.block, place.block, compute, d_x_ref, factor_ref)

    zero_unless(walk.active, d_x_ref, d_weight_ref, factor_ref)


def _gate_and_up(kept_ref, rows, gate_up_buffer, buffer):
    """As they were kept, or, of the rows, computed and rounded as `_forward_kernel` does."""
    if len(kept_ref.shape) == 3:
        return kept_ref[0, :rows], kept_ref[1, :rows]
    x = kept_ref[:rows]
    return [dot_transposed(x, gate_up_buffer[buffer, matrix]).astype(x.dtype) for matrix in (0, 1)]


class Places:
    """Grid and block specifications of a walk over the plan's blocks."""

    def __init__(self, plan: Dispatch, target: Generation) -> None:
        self.blocks, self.block = plan.source.shape
        self.cores = target.cores
        self.grid = (self.cores, self.blocks // self.cores)

    def walk(self, core, step, used) -> Walk:
        return Walk(used[0], self.blocks, self.cores, core, step)

    def _index(self, out, aside):
        def index(core, step, experts, ends, used, *_):
            walk = self.walk(core, step, used)
            return (used[1] if aside else 0) + (walk.block if out else walk.source)

        return index

    def rows(self, width, out=False, aside=False) -> pl.BlockSpec:
        """Of [N b, width], or of rows kept aside, from the block on that `used` names second."""
        index = self._index(out, aside)
        return pl.BlockSpec((self.block, width), lambda *at: (index(*at), 0))

    def stacked(self, lead, width, out=False) -> pl.BlockSpec:
        """Of [lead, N b, width]; outputs may be kept aside as rows may."""
        index = self._index(out, out)
        return pl.BlockSpec((lead, self.block, width), lambda *at: (0, index(*at), 0))

    def of_expert(self, lead, width) -> pl.BlockSpec:
        """Of [E, lead, width]: what the block's expert has."""
        index = self._index(False, False)
        return pl.BlockSpec((1, lead, width), lambda *at: (at[2][index(*at)], 0, 0))

    def weights(self, out=False) -> pl.BlockSpec:
        """Of [N, 1, b]."""
        index = self._index(out, False)
        return pl.BlockSpec((1, 1, self.block), lambda *at: (index(*at), 0, 0))


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _cost(rows, down, row_arrays, products=3):
    experts, size, hidden = down.shape
    return pl.CostEstimate(
        flops=2 * products * rows.shape[0] * size * hidden,
        bytes_accessed=(rows.shape[0] * row_arrays * hidden + 3 * experts * size * hidden) * rows.dtype.itemsize,
        transcendentals=rows.shape[0] * size,
    )
