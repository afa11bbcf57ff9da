"""The fused expert MLP on a TPU: gate, up, SwiGLU and down of a block of rows without leaving the chip's memory.

Rows are in blocks of one expert (`dispatch`). Both kernels walk the blocks in order, each core over its half, with the
expert's three matrices fetched ahead of use. Unused blocks at the end are written as zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch.api import Dispatch
from pallas_kernels.dispatch.stream import Stream, Walk

TRANSPOSED = (((1,), (1,)), ((), ()))


def forward(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, plan: Dispatch, *, cores: int, keep: bool, interpret
) -> tuple[jax.Array, ...]:
    """W_down(silu(W_gate x) * (W_up x)) of every row, by its block's expert.

    Args:
        rows: [N b, h], compute dtype.
        gate_up: [E, 2F, h].
        down: [E, F, h].
        plan: the blocks.
        cores: cores that share the blocks.
        keep: also return what the backward pass wants.
        interpret: as `pallas_call` takes it.

    Returns:
        values [N b, h], zero in unused blocks, and, with `keep`, (gate, up) [2, N b, F].
    """
    size, hidden = down.shape[1:]
    blocks, block = plan.source.shape
    arrays = [gate_up.reshape(-1, 2, size, hidden), down]
    out_shapes = [jax.ShapeDtypeStruct(rows.shape, rows.dtype)]
    out_specs = [_rows(block, hidden, blocks, cores, out=True)]
    if keep:
        out_shapes.append(jax.ShapeDtypeStruct((2, rows.shape[0], size), rows.dtype))
        out_specs.append(_stacked(2, block, size, blocks, cores, out=True))
    return pl.pallas_call(
        functools.partial(_forward_kernel, blocks=blocks, cores=cores, keep=keep),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, blocks // cores),
            in_specs=[_rows(block, hidden, blocks, cores), *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=out_specs,
            scratch_shapes=Stream.scratch(arrays),
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(rows, down, 1, 3 if keep else 2),
        interpret=interpret,
        name="expert_mlp_forward",
    )(*_prefetched(plan), rows, *arrays)


def input_gradient(
    d_rows: jax.Array,
    gate_and_up: jax.Array,
    slot_weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    plan: Dispatch,
    *,
    cores: int,
    interpret,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the rows and of their weights, and the factors of the weight gradient.

    Args:
        d_rows: [N b, h], the cotangent of each row's token, before the weight.
        gate_and_up: [2, N b, F], kept by `forward`.
        slot_weights: [N, b] float32, zero in padding slots.
        gate_up, down, plan, cores, interpret: as of `forward`.

    Returns:
        d_x [N b, h]; factors [3, N b, F], the gradients of gate and up and the weighted activation, zero in padding
        slots; d_weights [N, b] float32.
    """
    size, hidden = down.shape[1:]
    blocks, block = plan.source.shape
    arrays = [gate_up.reshape(-1, 2, size, hidden), down]
    weight_spec = functools.partial(_stacked, blocks=blocks, cores=cores, by_block=True)
    d_x, factors, d_weights = pl.pallas_call(
        functools.partial(_input_gradient_kernel, blocks=blocks, cores=cores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, blocks // cores),
            in_specs=[
                _rows(block, hidden, blocks, cores),
                _stacked(2, block, size, blocks, cores),
                weight_spec(1, 1, block),
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            ],
            out_specs=[
                _rows(block, hidden, blocks, cores, out=True),
                _stacked(3, block, size, blocks, cores, out=True),
                weight_spec(1, 1, block, out=True),
            ],
            scratch_shapes=Stream.scratch(arrays),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(d_rows.shape, d_rows.dtype),
            jax.ShapeDtypeStruct((3, d_rows.shape[0], size), d_rows.dtype),
            jax.ShapeDtypeStruct((blocks, 1, block), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(d_rows, down, 1, 5),
        interpret=interpret,
        name="expert_mlp_input_gradient",
    )(*_prefetched(plan), d_rows, gate_and_up, slot_weights[:, None], *arrays)
    return d_x, factors, d_weights[:, 0]


def _forward_kernel(experts, ends, used, x_ref, gate_up_hbm, down_hbm, *refs, blocks, cores, keep):
    y_ref, *kept, gate_up_buffer, down_buffer, semaphores, place_ref = refs
    walk = Walk(used[0], blocks, cores, pl.program_id(0), pl.program_id(1))
    stream = Stream((gate_up_hbm, down_hbm), (gate_up_buffer, down_buffer), semaphores, place_ref)

    @pl.when(walk.active)
    def _():
        place, _ = stream.at(walk, experts, ends)
        x = x_ref[...]
        gate = _dot_transposed(x, gate_up_buffer[place, 0])
        up = _dot_transposed(x, gate_up_buffer[place, 1])
        activation = gate * jax.nn.sigmoid(gate) * up
        y_ref[...] = _dot(activation.astype(x.dtype), down_buffer[place]).astype(y_ref.dtype)
        if keep:
            kept[0][0] = gate.astype(x.dtype)
            kept[0][1] = up.astype(x.dtype)

    _zero_unless(walk.active, y_ref, *kept)


def _input_gradient_kernel(
    experts, ends, used, d_ref, gate_and_up_ref, weight_ref, gate_up_hbm, down_hbm, *refs, blocks, cores
):
    d_x_ref, factor_ref, d_weight_ref, gate_up_buffer, down_buffer, semaphores, place_ref = refs
    walk = Walk(used[0], blocks, cores, pl.program_id(0), pl.program_id(1))
    stream = Stream((gate_up_hbm, down_hbm), (gate_up_buffer, down_buffer), semaphores, place_ref)

    @pl.when(walk.active)
    def _():
        place, _ = stream.at(walk, experts, ends)
        dtype = d_ref.dtype
        d_activation = _dot_transposed(d_ref[...], down_buffer[place])  # before the weight
        gate, up = gate_and_up_ref[0].astype(jnp.float32), gate_and_up_ref[1].astype(jnp.float32)
        sigmoid = jax.nn.sigmoid(gate)
        silu = gate * sigmoid
        activation = silu * up
        # d w = <W_down^T d_out, activation>: the values themselves needn't be kept.
        d_weight_ref[0] = _as_row(jnp.sum(d_activation * activation, axis=1, keepdims=True))
        weight = _as_column(weight_ref[0])
        d_activation = d_activation * weight
        d_gate = (d_activation * up * (sigmoid + silu * (1 - sigmoid))).astype(dtype)
        d_up = (d_activation * silu).astype(dtype)
        d_x = _dot(d_gate, gate_up_buffer[place, 0]) + _dot(d_up, gate_up_buffer[place, 1])
        d_x_ref[...] = d_x.astype(dtype)
        factor_ref[0] = d_gate
        factor_ref[1] = d_up
        factor_ref[2] = (activation * weight).astype(dtype)

    _zero_unless(walk.active, d_x_ref, factor_ref, d_weight_ref)


def _zero_unless(active, *refs):
    @pl.when(jnp.logical_not(active))
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=_precision(a))


def _dot_transposed(a, b):
    return jax.lax.dot_general(a, b, TRANSPOSED, preferred_element_type=jnp.float32, precision=_precision(a))


def _precision(a):
    """Float32 arguments are multiplied as float32: they are for checks, not for speed."""
    return "highest" if a.dtype == jnp.float32 else None


def _diagonal(size):
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), 0) == jax.lax.broadcasted_iota(
        jnp.int32, (size, size), 1
    )


def _as_column(row):
    """[1, b] -> [b, 1], by a masked sum: a handful of operations where a transpose takes a relayout."""
    size = row.shape[1]
    return jnp.sum(jnp.where(_diagonal(size), jnp.broadcast_to(row, (size, size)), 0.0), axis=1, keepdims=True)


def _as_row(column):
    """[b, 1] -> [1, b]."""
    size = column.shape[0]
    return jnp.sum(jnp.where(_diagonal(size), jnp.broadcast_to(column, (size, size)), 0.0), axis=0, keepdims=True)


def _prefetched(plan):
    ends = plan.first_block + plan.num_blocks
    return plan.block_expert, ends, plan.used_blocks.reshape(1)


def _rows(block, width, blocks, cores, out=False):
    def index(core, step, experts, ends, used):
        walk = Walk(used[0], blocks, cores, core, step)
        return (walk.block if out else walk.source), 0

    return pl.BlockSpec((block, width), index)


def _stacked(lead, block, width, blocks, cores, out=False, by_block=False):
    def index(core, step, experts, ends, used):
        walk = Walk(used[0], blocks, cores, core, step)
        which = walk.block if out else walk.source
        return (which, 0, 0) if by_block else (0, which, 0)

    return pl.BlockSpec((lead, block, width), index)


def _cost(rows, down, products, row_arrays):
    experts, size, hidden = down.shape
    flops = 6 * products * rows.shape[0] * size * hidden
    moved = rows.shape[0] * row_arrays * hidden + 3 * experts * size * hidden
    return pl.CostEstimate(
        flops=flops, bytes_accessed=moved * rows.dtype.itemsize, transcendentals=rows.shape[0] * size
    )
