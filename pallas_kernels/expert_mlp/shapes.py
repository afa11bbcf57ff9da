"""Which shapes the expert-MLP kernels take, their tiles, and what they move."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.tiles import Generation

LANES = 128
COMPILER = 1 << 19
"""Bytes of vector memory that libtpu took beside what is counted, at most, in bfloat16 at the largest experts."""
BUNDLES = {
    "v4": {
        "expert_mlp_forward": 5581,
        "keep expert_mlp_forward": 5696,
        "keep expert_mlp_input_gradient": 7110,
        "keep expert_weight_gradient": 1877,
    },
    "v5e": {
        "expert_mlp_forward": 4719,
        "keep expert_mlp_forward": 4874,
        "keep expert_mlp_input_gradient": 5172,
        "keep expert_weight_gradient": 2989,
    },
    "v5p": {
        "expert_mlp_forward": 4745,
        "keep expert_mlp_forward": 4840,
        "keep expert_mlp_input_gradient": 5376,
        "keep expert_weight_gradient": 3060,
    },
}
"""TPU generation -> kernel -> VLIW bundles of a grid step, as libtpu 0.0.42 compiled it at E = 537, F = 480, h = 1024,
blocks of 128 rows; "keep": as the backward pass of the depth scan calls it. All of a block and half of it are two ways
of a step, of which one is taken; both are counted (v5p forward: 3,137 and 1,926). tests/aot notes what costs more."""


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut their work.

    Attributes:
        block: rows of a block.
        columns: columns of the weight gradient that are worked on at a time.
    """

    block: int
    columns: int

    @classmethod
    def of(cls, pairs: int, experts: int, size: int, hidden: int, dtype: jnp.dtype, target: Generation) -> Tiles | None:
        """The tiles for P pairs over E experts of [F, h] on a TPU generation, or None if they don't fit its memory."""
        mean = pairs / experts
        blocks = [rows for reached, rows in target.expert_rows if mean >= reached]
        block = next((b for b in blocks[::-1] if forward_vmem(b, size, hidden, dtype, target) <= target.vmem), None)
        if block is None:
            return None
        divisors = [hidden // n for n in range(1, hidden // LANES + 1) if hidden % n == 0 and hidden // n % LANES == 0]
        fitting = [tile for tile in divisors if gradient_vmem(block, size, tile, dtype, target) <= target.vmem]
        return cls(block, fitting[0]) if fitting else None


def unsupported(indices: tuple[int, ...], gate_up: tuple[int, ...], dtype: jnp.dtype, target: Generation) -> str | None:
    """Why no kernel takes indices [T, k] and experts [E, 2F, h], or None if one does."""
    experts, doubled, hidden = gate_up
    size, pairs = doubled // 2, indices[0] * indices[1]
    if hidden % LANES:
        return f"a hidden size of {hidden} is no multiple of {LANES}"
    if size % 8:
        return f"an expert size of {size} is no multiple of 8"
    if pairs + experts * 256 >= 1 << 24:
        return f"{pairs} (token, choice) pairs are too many to count in float32; use microbatches"
    if Tiles.of(pairs, experts, size, hidden, dtype, target) is None:
        return f"experts of {size} x {hidden} in {jnp.dtype(dtype).name} don't fit the vector memory of {target.name}"
    return None


def forward_vmem(block: int, size: int, hidden: int, dtype: jnp.dtype, target: Generation) -> int:
    """Bytes of vector memory of the forward and the input-gradient kernel: weights and rows twice, and temporaries."""
    weights = (2 * 3 + target.spilled(dtype, 4)) * size * hidden
    rows = 2 * block * (3 * hidden + 5 * size)
    beside = COMPILER if target.spills and jnp.dtype(dtype).itemsize < 4 else 0
    return (weights + rows) * jnp.dtype(dtype).itemsize + 4 * block * (4 * size + hidden) + beside


def gradient_vmem(block: int, size: int, columns: int, dtype: jnp.dtype, target: Generation) -> int:
    """Bytes of vector memory of the weight-gradient kernel: three buffers of totals, factors twice, one product."""
    totals = (3 * 3 + target.spilled(dtype, 3)) * size * columns
    rows = 2 * block * (3 * size + 2 * columns)
    return 4 * (totals + size * columns) + rows * jnp.dtype(dtype).itemsize


def depths_aside(rows: int, size: int, hidden: int, dtype: jnp.dtype, total: int, target: Generation) -> int:
    """Depths whose rows are kept aside and added to the weight gradients in one pass, if nobody says how many.

    The largest power of two, up to 8 and the model's depth, whose rows fit an eighth of the chip's memory: rows are
    fetched and written all the same, and the totals are read and written that many times less often.

    Args:
        rows: R of a depth, padding included.
        size, hidden: F, h.
        dtype: compute dtype.
        total: L.
        target: the chip.
    """
    one = rows * (3 * size + 2 * hidden) * jnp.dtype(dtype).itemsize
    return max(n for n in (1, 2, 4, 8) if n == 1 or (n <= total and n * one <= target.memory / 8))


def forward_bytes(pairs: int, experts: int, size: int, hidden: int, itemsize: int = 2) -> int:
    """The least a forward call must move: each row in and out, each expert's matrices once."""
    return itemsize * (2 * pairs * hidden + 3 * experts * size * hidden)


def weight_gradient_bytes(
    pairs: int, experts: int, size: int, hidden: int, depths: float = 1, passes: int = 1, itemsize: int = 2
) -> float:
    """What the weight gradient moves for one depth: its factors, and a `depths`-th of reading and writing the totals.

    Args:
        pairs, experts, size, hidden: P, E, F, h.
        depths: depths that share one pass over the totals.
        passes: times the left factors are read, h over the tile's columns.
        itemsize: of the factors.
    """
    rows = pairs * itemsize * (3 * size * passes + 2 * hidden)
    return rows + 3 * experts * size * hidden * 2 * 4 / depths


def autodiff_weight_gradient_bytes(pairs: int, experts: int, size: int, hidden: int, itemsize: int = 2) -> int:
    """The same by differentiating a scan: the gradient written in compute dtype, read back, added to float32 totals."""
    rows = pairs * itemsize * (3 * size + 2 * hidden)
    return rows + 3 * experts * size * hidden * (2 * itemsize + 8)
