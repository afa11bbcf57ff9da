"""Products of few rows on an NVIDIA GPU, as decoding has them: Triton kernels (through Pallas), forward only.

A program has one row and some of its results, and reads its part of the row's matrix where it lies. Nothing is sorted
into blocks: a step of decoding is bound by the number of its kernels, and `plan_dispatch` is ten of them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.gpu import plgpu
from pallas_kernels.weights import Arranged, OutputColumns, OutputRows

F32 = jnp.float32
REPEATED = 100e6
"""Bytes of matrices that may be read again for rows with the same one. An estimate: at 5 TB/s of an H200's cache that
is 20 us, and so long is sorting."""
MOST = 1024
"""Rows, whatever their matrices' size."""
UP, DOWN, INNER = 16, 32, 256
"""Results of a program where a matrix has a row for each, or a column; what is multiplied at a time. Not tuned."""
WARPS = 4


def few(rows: int, matrices: Any, among: int | None = None) -> bool:
    """Whether so many rows are better taken one by one, each with one of matrices [E, a, b], or of `among` of them."""
    kept = _parts(matrices)[0]
    again = rows - min(rows, among or len(kept))
    return rows <= MOST and again * math.prod(kept.shape[1:]) * kept.dtype.itemsize <= REPEATED


def swiglu(x: jax.Array, indices: jax.Array, gate_up: jax.Array | OutputRows) -> jax.Array:
    """silu(W_gate x) * (W_up x) of each token's experts.

    Args:
        x: [T, h].
        indices: [T, k] int32; E stands for no expert: zero.
        gate_up: [E, 2F, h], W_gate's rows, then W_up's; or in int8.

    Returns:
        [T k, F], x's dtype.
    """
    gate_up, *scales = _parts(gate_up)
    (_, hidden), (tokens, choices), size = x.shape, indices.shape, gate_up.shape[1] // 2
    tile = gpu.tile_of(size, UP), gpu.tile_of(hidden, INNER)
    return pl.pallas_call(
        functools.partial(_swiglu_kernel, tile=tile, choices=choices),
        grid=(pl.cdiv(size, tile[0]), tokens * choices),
        out_shape=jax.ShapeDtypeStruct((tokens * choices, size), x.dtype),
        name="few_swiglu",
        **gpu.compile_for(WARPS),
    )(indices.reshape(-1), x, gate_up, *scales)


def product(
    x: jax.Array, index: jax.Array, matrices: jax.Array | OutputColumns, dtype: jnp.dtype | None = None
) -> jax.Array:
    """Each row times its matrix.

    Args:
        x: [R, a].
        index: [R] int32, or [1] for all rows; G stands for no matrix: zero.
        matrices: [G, a, b]; or in int8.
        dtype: of the result; None for x's.

    Returns:
        [R, b].
    """
    matrices, *scales = _parts(matrices)
    (rows, length), width = x.shape, matrices.shape[2]
    tile = gpu.tile_of(length, INNER), gpu.tile_of(width, DOWN)
    return pl.pallas_call(
        functools.partial(_product_kernel, tile=tile),
        grid=(pl.cdiv(width, tile[1]), rows),
        out_shape=jax.ShapeDtypeStruct((rows, width), dtype or x.dtype),
        name="few_product",
        **gpu.compile_for(WARPS),
    )(index, x, matrices, *scales)


def _parts(matrices: jax.Array | Arranged) -> tuple[jax.Array, ...]:
    """The matrices, and of int8 what each output is to be multiplied by, [E, outputs] float32."""
    if not isinstance(matrices, Arranged):
        return (matrices,)
    assert matrices.scales is not None  # in int8
    return matrices.matrices, matrices.scales


def _swiglu_kernel(index_ref, x_ref, gate_up_ref, *refs, tile, choices):
    (*scales, out_ref), (size, inner) = refs, tile
    part, pair = pl.program_id(0), pl.program_id(1)
    (experts, doubled, hidden), expert = gate_up_ref.shape, index_ref[pair]
    own = gpu.inside(part, size, doubled // 2)
    halves = [pl.ds(start + part * size, size) for start in (0, doubled // 2)]

    def add(step, totals):
        along, left = pl.ds(step * inner, inner), gpu.inside(step, inner, hidden)
        x = _line(x_ref.at[jax.lax.div(pair, choices), along], left)
        matrices = (gpu.load(gate_up_ref.at[expert, half, along], own, left) for half in halves)
        return tuple(total + matrix.astype(F32) * x.astype(F32) for total, matrix in zip(totals, matrices, strict=True))

    # Without an expert no step is taken.
    steps = jnp.where(expert < experts, jnp.int32(pl.cdiv(hidden, inner)), jnp.int32(0))
    totals = (jnp.sum(its, 1) for its in jax.lax.fori_loop(0, steps, add, (jnp.zeros(tile, F32),) * 2))
    gate, up = (_scaled(total, scales, expert, half, own) for total, half in zip(totals, halves, strict=True))
    plgpu.store(out_ref.at[pair, pl.ds(part * size, size)], (jax.nn.silu(gate) * up).astype(out_ref.dtype), mask=own)


def _product_kernel(index_ref, x_ref, matrices_ref, *refs, tile):
    (*scales, out_ref), (inner, columns) = refs, tile
    part, row = pl.program_id(0), pl.program_id(1)
    (count, length, width), index = matrices_ref.shape, index_ref[row if index_ref.shape[0] > 1 else 0]
    own, across = gpu.inside(part, columns, width), pl.ds(part * columns, columns)

    def add(step, total):
        along, left = pl.ds(step * inner, inner), gpu.inside(step, inner, length)
        x = _line(x_ref.at[row, along], left)
        return total + gpu.load(matrices_ref.at[index, along, across], left, own).astype(F32) * x.astype(F32)[:, None]

    steps = jnp.where(index < count, jnp.int32(pl.cdiv(length, inner)), jnp.int32(0))
    total = jnp.sum(jax.lax.fori_loop(0, steps, add, jnp.zeros(tile, F32)), 0)
    total = _scaled(total, scales, index, across, own)
    plgpu.store(out_ref.at[row, across], total.astype(out_ref.dtype), mask=own)


def _scaled(total, scales, index, outputs, own):
    """Sums of products, multiplied by their outputs' scales, where there are some."""
    if not scales:
        return total
    number = jnp.minimum(index, scales[0].shape[0] - 1)  # none's sums are zero
    return total * _line(scales[0].at[number, outputs], own)


def _line(ref, inside):
    """Some numbers in a row, zero outside of the array."""
    return plgpu.load(ref, mask=inside, other=None if inside is None else 0.0)
