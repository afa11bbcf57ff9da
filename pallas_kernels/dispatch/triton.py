"""Grouped matrix products on an NVIDIA GPU: one Triton kernel (through Pallas) for each of `grouped`'s.

A block of rows belongs to one expert, whose matrix is read where it lies: nothing is gathered for a block, and a
weight gradient is summed over an expert's blocks before it is written.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.dispatch import grouped
from pallas_kernels.dispatch.api import Dispatch, plan_blocks
from pallas_kernels.gpu import plgpu

F32 = jnp.float32
SMALLEST = 16
"""Of a side of a product that the matrix units take."""


class Tiles(NamedTuple):
    """How a product is cut.

    Attributes:
        rows, columns: of the result that a program computes.
        inner: what is multiplied at a time.
        warps: of a program.
        stages: loads in flight.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


PRODUCT = Tiles(rows=128, columns=128, inner=64, warps=8, stages=3)
OUTER = Tiles(rows=64, columns=128, inner=64, warps=4, stages=4)


def unsupported(pairs: int, matrices: tuple[int, ...], dtype: jnp.dtype) -> str | None:
    """Why the kernels don't take so many rows and matrices [E, f, h], or None if they do."""
    experts, size, hidden = matrices
    if min(size, hidden) < SMALLEST:
        return f"a side of {min(size, hidden)} is less than {SMALLEST}"
    if size % 8 or hidden % 8:
        return f"rows of {size} and {hidden} are not multiples of 16 bytes"
    block = block_size(pairs, experts)
    rows = plan_blocks(pairs, experts, block) * block
    return gpu.unsupported_products(rows * max(size, hidden), experts * size * hidden, dtype=dtype)


def block_size(pairs: int, experts: int) -> int:
    """Rows of a block: two thirds of what an expert gets, as a power of two up to a tile's.

    Measured on an H200: at 239 rows an expert blocks of 128 are faster than of 64 (forward 2.57 against 2.72 ms).
    """
    return min(PRODUCT.rows, max(SMALLEST, 1 << max(0, (3 * pairs // (2 * experts)).bit_length() - 1)))


def up(rows: jax.Array, weight: jax.Array, plan: Dispatch, tiles: Tiles = PRODUCT) -> jax.Array:
    """Rows times the transpose of their expert's matrix: [N, b, h], [E, f, h] -> [N, b, f]."""
    return _product(rows, weight, plan, tiles, transposed=True)


def down(rows: jax.Array, weight: jax.Array, plan: Dispatch, tiles: Tiles = PRODUCT) -> jax.Array:
    """Rows times their expert's matrix: [N, b, f], [E, f, h] -> [N, b, h]."""
    return _product(rows, weight, plan, tiles, transposed=False)


def outer(
    left: jax.Array, right: jax.Array, plan: Dispatch, into: jax.Array | None = None, tiles: Tiles = OUTER
) -> jax.Array:
    """Sum over an expert's rows of outer products: [N, b, f], [N, b, h] -> [E, f, h] float32; onto `into`, in place.

    Padding rows must be zero in `left` or in `right`, and finite in the other.
    """
    (_, block, size), hidden = left.shape, right.shape[-1]
    rows, columns = gpu.tile_of(size, tiles.rows), gpu.tile_of(hidden, tiles.columns)
    inner = min(block, tiles.inner)
    experts, added = plan.first_block.shape[0], () if into is None else (into,)
    return pl.pallas_call(
        functools.partial(_outer_kernel, tile=(rows, columns, inner), steps=block // inner),
        grid=(pl.cdiv(hidden, columns), pl.cdiv(size, rows), experts),
        out_shape=jax.ShapeDtypeStruct((experts, size, hidden), F32),
        input_output_aliases={} if into is None else {4: 0},
        name="expert_outer",
        **gpu.compile_for(tiles.warps, tiles.stages),
    )(plan.first_block, plan.num_blocks, left.reshape(-1, size), right.reshape(-1, hidden), *added)


TRITON = grouped.Products(up, down, outer, block_size)


def _product(rows, weight, plan, tiles, transposed):
    blocks, block, length = rows.shape
    width = weight.shape[1 if transposed else 2]
    height, columns, inner = min(block, tiles.rows), gpu.tile_of(width, tiles.columns), gpu.tile_of(length, tiles.inner)
    return pl.pallas_call(
        functools.partial(_product_kernel, tile=(height, columns, inner), transposed=transposed),
        grid=(pl.cdiv(width, columns), block // height, blocks),
        out_shape=jax.ShapeDtypeStruct((blocks, block, width), rows.dtype),
        name="expert_product",
        **gpu.compile_for(tiles.warps, tiles.stages),
    )(plan.block_expert, plan.used_blocks[None], rows, weight)


def _product_kernel(expert_ref, used_ref, rows_ref, weight_ref, out_ref, *, tile, transposed):
    height, columns, inner = tile
    column, part, block = (pl.program_id(axis) for axis in range(3))
    length, width = rows_ref.shape[2], out_ref.shape[2]
    expert = expert_ref[block]
    rows, across = pl.ds(part * height, height), pl.ds(column * columns, columns)
    inside = gpu.inside(column, columns, width)

    def add(step, total):
        along = pl.ds(step * inner, inner)
        left = gpu.inside(step, inner, length)
        x = gpu.load(rows_ref.at[block, rows, along], None, left)
        if transposed:
            return total + plgpu.dot(x, gpu.load(weight_ref.at[expert, across, along], inside, left), trans_b=True)
        return total + plgpu.dot(x, gpu.load(weight_ref.at[expert, along, across], left, inside))

    # A block that isn't used becomes zero, without a step.
    steps = jnp.where(block < used_ref[0], jnp.int32(pl.cdiv(length, inner)), jnp.int32(0))
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((height, columns), F32))
    mask = None if inside is None else jnp.broadcast_to(inside[None], total.shape)
    plgpu.store(out_ref.at[block, rows, across], total.astype(out_ref.dtype), mask=mask)


def _outer_kernel(first_ref, blocks_ref, left_ref, right_ref, *refs, tile, steps):
    *added, out_ref = refs  # what is added to is read through the aliased result
    rows, columns, inner = tile
    column, row, expert = (pl.program_id(axis) for axis in range(3))
    down, across = pl.ds(row * rows, rows), pl.ds(column * columns, columns)
    inside = gpu.inside(row, rows, left_ref.shape[1]), gpu.inside(column, columns, right_ref.shape[1])

    def add(step, total):
        along = pl.ds(step * inner, inner)
        left = gpu.load(left_ref.at[along, down], None, inside[0])
        return total + plgpu.dot(left, gpu.load(right_ref.at[along, across], None, inside[1]), trans_a=True)

    first = first_ref[expert] * steps
    last = first + blocks_ref[expert] * steps
    total = jax.lax.fori_loop(first, last, add, jnp.zeros((rows, columns), F32))
    place = out_ref.at[expert, down, across]
    if not added:
        plgpu.store(place, total, mask=gpu.mask_of(*inside, total.shape))
        return

    @pl.when(last > first)  # the others' stay as they are
    def _():
        plgpu.store(place, total + gpu.load(place, *inside), mask=gpu.mask_of(*inside, total.shape))
