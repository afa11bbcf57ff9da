"""Which shapes the depth-attention kernels take, their blocks, and what they move."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.window import WHOLE, Window
from pallas_kernels.tiles import INTERPRETED, Generation, generation

LANES = 128


@dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work.

    Attributes:
        tokens: tokens of a block.
        slots: cache slots of a block; blocks past the depth are never fetched.
        rows: tokens that the inner loop works on at once.
    """

    tokens: int
    slots: int
    rows: int

    @classmethod
    def of(cls, cache: DepthCache, target: Generation, backward: bool = False) -> Blocks:
        """The blocks for a cache [L, T, kv d] on a TPU generation, all of them full; `unsupported` must be None."""
        slots, tokens, _ = cache.keys.shape
        largest, rows = target.depth_backward if backward else target.depth_forward
        block = _largest_divisor(tokens, largest)
        return cls(
            block, max(n for n in range(1, target.depth_slots + 1) if slots % n == 0), _largest_divisor(block, rows)
        )


def near_blocks(cache: DepthCache, group: int, window: Window, target: Generation, backward: bool = False) -> Blocks:
    """The blocks of the kernels over a window: as many tokens as leave room for two blocks of all that is seen."""
    slots, tokens, _ = cache.keys.shape
    most = window.most(slots) - 1
    largest, rows = target.depth_backward if backward else target.depth_forward
    room = target.vmem // near_vmem(cache, group, window, backward)
    block = _largest_divisor(tokens, max(LANES, min(largest, room)))
    pieces = -(-most // target.depth_slots)
    return Blocks(block, -(-most // pieces) if most else 1, _largest_divisor(block, rows))


def near_vmem(cache: DepthCache, group: int, window: Window, backward: bool = True) -> int:
    """Bytes of vector memory that the kernels over a window need for a token."""
    slots, itemsize = cache.keys.shape[0], cache.keys.dtype.itemsize
    fetched = (window.most(slots) - 1) * (2 + 2 * group if backward else 2)
    rows = 6 * group + 4 if backward else 2 * group + 4  # read and written
    scratch = 3 * group + 2 if backward else 3 * group
    lanes = 2 * statistics_lanes(window.span(slots), group) if backward else 0
    return LANES * (2 * (fetched + rows) * itemsize + 4 * scratch) + 2 * 4 * lanes


def _largest_divisor(tokens: int, limit: int) -> int:
    """The largest multiple of a register's lanes, up to a limit, that divides a number of tokens."""
    return max(size for size in range(LANES, limit + 1, LANES) if tokens % size == 0)


def unsupported(shape: tuple[int, ...], dtype: jnp.dtype, cache: DepthCache, window: Window = WHOLE) -> str | None:
    """Why no kernel takes queries [T, n, d] of this shape with this cache and window, or None if one does."""
    tokens, heads, size = shape
    if tokens % LANES:
        return f"{tokens} tokens are not a multiple of {LANES}"
    if size != LANES and (heads > 1 or size > LANES or size % 8):
        return f"{heads} heads of size {size}; kernels take size {LANES}, or a single smaller head"
    if dtype != cache.keys.dtype:
        return f"queries are {dtype}, the cache is {cache.keys.dtype}"
    target = generation() or INTERPRETED
    if not window.whole and LANES * near_vmem(cache, heads * size // cache.keys.shape[2], window) > target.vmem:
        return f"{window.most(cache.keys.shape[0])} depths are seen, which is more than fit into the memory of a core"
    return None


def statistics_lanes(slots: int, group: int) -> int:
    """Lanes that hold a logarithm and a product for every slot and head of a group, in whole registers."""
    return -(-2 * slots * group // LANES) * LANES


def forward_bytes(tokens: int, heads: int, kv_heads: int, size: int, itemsize: int, below: int) -> int:
    """The least a forward step must move: the seen slots once, q, k and v in, the new slot and the result out."""
    return tokens * size * itemsize * (2 * kv_heads * below + 2 * heads + 4 * kv_heads)


def backward_bytes(tokens: int, heads: int, kv_heads: int, size: int, itemsize: int, below: int, above: int) -> int:
    """The least a backward step in pull form must move: keys and values of the seen slots below, queries and output
    gradients of those above, and this depth's own rows in and out."""
    cache = 2 * kv_heads * below + 2 * heads * above
    own = 2 * kv_heads + 3 * heads + heads + 2 * kv_heads + 2 * heads  # k v, q dO O; dq, dk dv, and two slots
    return tokens * size * itemsize * (cache + own)


BUNDLES = {
    "v4": {
        "depth_attention_forward": (158, 1002, 301),
        "depth_attention_recompute": (158, 1002, 301),
        "depth_attention_backward": (285, 615, 174, 664, 216),
    },
    "v5e": {
        "depth_attention_forward": (64, 291, 96),
        "depth_attention_recompute": (64, 291, 96),
        "depth_attention_backward": (222, 381, 130, 439, 158),
    },
    "v5p": {
        "depth_attention_forward": (64, 297, 98),
        "depth_attention_recompute": (64, 297, 98),
        "depth_attention_backward": (221, 383, 132, 442, 158),
    },
}
"""Bundles of the innermost loops (128 tokens, forward on v4 256; a whole block of four slots, or one slot), bfloat16,
d = 128, one head, in program order, as jax 0.10.2 compiles them. A test compiles them again and fails on 5 % more."""

WINDOW_BUNDLES = {
    "v4": {
        "depth_window_forward": (43, 45, 164, 4, 763, 302, 526),
        "depth_window_recompute": (43, 45, 166, 4, 749, 300, 522),
        "depth_window_backward": (43, 43, 58, 58, 288, 4, 449, 174, 310, 4, 516, 227, 380),
    },
    "v5e": {
        "depth_window_forward": (44, 44, 73, 4, 232, 96, 156),
        "depth_window_recompute": (44, 44, 73, 4, 232, 96, 156),
        "depth_window_backward": (45, 45, 49, 49, 234, 4, 309, 130, 225, 4, 371, 170, 280),
    },
    "v5p": {
        "depth_window_forward": (45, 45, 73, 4, 225, 100, 160),
        "depth_window_recompute": (45, 45, 73, 4, 230, 98, 157),
        "depth_window_backward": (46, 46, 49, 49, 231, 4, 313, 132, 223, 4, 367, 169, 276),
    },
}
"""The same of the kernels over a window of 4 depths, 2 apart: fetching, the own key, waiting; three slots, one, two."""
