"""Which shapes the linear-expert kernels take, and their tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.tiles import Generation

LANES = 128
WIDEST = 1024
"""Columns of a tile; wider ones would save little traffic, and make programs that take long to compile."""


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut their work.

    Attributes:
        block: rows of a block.
        outputs: columns of b, forward, that are worked on at a time.
        inputs: columns of a, in the input gradient.
        columns: columns of b in the weight gradient.
    """

    block: int
    outputs: int
    inputs: int
    columns: int

    @classmethod
    def of(cls, tokens: int, routed: tuple[int, ...], dtype: jnp.dtype, target: Generation) -> Tiles | None:
        """The tiles for T tokens over matrices [G, a, b], or None if they don't fit the vector memory."""
        experts, inward, outward = routed
        block = [rows for reached, rows in target.expert_rows if tokens / experts >= reached][-1]
        itemsize, limit = jnp.dtype(dtype).itemsize, target.vmem
        spilled = target.spilled(dtype, 3)

        def product(inner: int, tile: int) -> int:
            weights = (4 + spilled) * inner * tile  # two experts', the shared one, their sum
            rows = 2 * block * (inner + 2 * tile)
            return itemsize * (weights + rows) + 8 * block * tile

        def gradient(tile: int) -> int:
            return 4 * (4 + spilled) * inward * tile + itemsize * 2 * block * (inward + tile)

        outputs = _largest(outward, limit, lambda tile: product(inward, tile))
        inputs = _largest(inward, limit, lambda tile: product(outward, tile))
        columns = _largest(outward, limit, gradient)
        return cls(block, outputs, inputs, columns) if outputs and inputs and columns else None


def _largest(size: int, limit: int, need: Callable[[int], int]) -> int | None:
    """The largest tile of whole lanes that divides `size` and fits."""
    tiles = [size // n for n in range(1, size // LANES + 1) if size % n == 0 and size // n % LANES == 0]
    return next((tile for tile in tiles if tile <= WIDEST and need(tile) <= limit), None)


def unsupported(tokens: int, routed: tuple[int, ...], dtype: jnp.dtype, target: Generation) -> str | None:
    """Why no kernel takes T tokens and matrices [G, a, b], or None if one does."""
    if routed[1] % LANES or routed[2] % LANES:
        return f"matrices of {routed[1]} x {routed[2]} are no multiples of {LANES}"
    if Tiles.of(tokens, routed, dtype, target) is None:
        return f"matrices of {routed[1]} x {routed[2]} don't fit the vector memory of {target.name}"
    return None


ENOUGH = 1024
"""Rows of an expert whose product takes as long, on every chip, as reading and writing the expert's total: rows aside
of more depths than make so many would shorten nothing."""


def depths_aside(
    asked: int, tokens: int, rows: int, routed: tuple[int, ...], dtype: jnp.dtype, total: int, target: Generation
) -> int:
    """Depths whose rows are kept aside and added to the weight gradient in one pass: never more than are of use.

    If nobody says how many, the largest power of two, up to 8 and the model's depth, whose rows fit a 32nd of the
    chip's memory: a layer has a few such maps.

    Args:
        asked: how many, 0 to choose.
        tokens: T of a depth.
        rows: R of a depth, padding included.
        routed: shape (G, a, b).
        dtype: compute dtype.
        total: L.
        target: the chip.
    """
    experts, inward, outward = routed
    one = rows * (inward + outward) * jnp.dtype(dtype).itemsize
    fitting = max(n for n in (1, 2, 4, 8) if n == 1 or (n <= total and n * one <= target.memory / 32))
    return min(asked or fitting, -(-ENOUGH * experts // tokens))


BUNDLES = {
    "v4": {
        "expert_linear_forward": (8236, 8225, 3433, 1500),
        "expert_linear_input_gradient": (12491, 12560, 5469, 2112),
        "expert_weight_gradient": (2547, 2523, 1911, 912),
    },
    "v5e": {
        "expert_linear_forward": (6743, 12722, 2614, 1224),
        "expert_linear_input_gradient": (41663, 11299, 4511, 1790),
        "expert_weight_gradient": (4052, 7751, 1856, 735),
    },
    "v5p": {
        "expert_linear_forward": (6801, 12774, 2665, 1276),
        "expert_linear_input_gradient": (43786, 11440, 4576, 1876),
        "expert_weight_gradient": (4097, 7811, 1914, 785),
    },
}
"""TPU generation -> kernel -> VLIW bundles of a grid step, as libtpu 0.0.42 compiled it, for T = 32,768 tokens, G = 32
experts and the projections 1024 x 4096, 2048 x 1024, 1024 x 384 and 128 x 1024. All of a block and half of it are two
ways of a step, of which one is taken; both are counted. tests/aot fails on 5 % more."""
