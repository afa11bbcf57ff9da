"""Which shapes the depth-attention kernels take, their blocks, and what they move."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.window import WHOLE, Window
from pallas_kernels.tiles import INTERPRETED, Generation, generation

LANES, SUBLANES = 128, 8  # of a register of float32


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
    def of(cls, cache: DepthCache, group: int, target: Generation, backward: bool = False) -> Blocks:
        """The blocks for a cache [L, T, kv d] and n / kv query heads a key head on a TPU generation, all of them full,
        as large as a core has room for; `unsupported` must be None."""
        slots, tokens, _ = cache.keys.shape
        most = target.depth_slots if backward else target.depth_slots_forward
        largest, rows = target.depth_backward if backward else target.depth_forward

        def room(n: int) -> int:
            spilled = rows * spilled_vmem(group, n) if backward else 0
            return (target.vmem - spilled) // whole_vmem(cache, group, n, backward)

        divisors = [n for n in range(most, 0, -1) if slots % n == 0]
        of_slots = next((n for n in divisors if room(n) >= LANES), 1)
        block = _largest_divisor(tokens, max(LANES, min(largest, room(of_slots))))
        return cls(block, of_slots, _largest_divisor(block, rows))


def whole_vmem(cache: DepthCache, group: int, slots: int, backward: bool = True) -> int:
    """Bytes of vector memory that the kernels over all depths need for a token, with so many slots in a block."""
    itemsize = cache.keys.dtype.itemsize
    fetched = slots * (2 + 2 * group if backward else 2)
    rows = 6 * group + 4 if backward else 2 * group + 4  # read and written
    turned, sums = (2, group + 2) if backward else (group, group)  # scratch
    eights = -(-group // SUBLANES) * SUBLANES
    numbers = 2 * eights + 2 * statistics_rows(group) * (slots + 1) if backward else 4 * eights
    return LANES * ((2 * (fetched + rows) + turned) * itemsize + 4 * sums) + 4 * numbers


def spilled_vmem(group: int, slots: int) -> int:
    """Bytes that the compiler takes beside for each token of the backward kernel's inner loop: what doesn't fit the
    registers of its ways for 1 to `slots` slots. An estimate, from two shapes that a v4 had no room for."""
    return 4 * LANES * 2 * group * (slots + 1)


def near_blocks(cache: DepthCache, group: int, window: Window, target: Generation, backward: bool = False) -> Blocks:
    """The blocks of the kernels over a window: as many tokens as leave room for two blocks of all that is seen
    and, backward, for what the compiler spills."""
    tokens, at_once = cache.keys.shape[1], _walked(cache, window, target)
    largest, rows = target.depth_backward if backward else target.depth_forward
    spilled = rows * spilled_vmem(group, at_once) if backward else 0
    room = (target.vmem - spilled) // near_vmem(cache, group, window, backward)
    block = _largest_divisor(tokens, max(LANES, min(largest, room)))
    return Blocks(block, at_once, _largest_divisor(block, rows))


def _walked(cache: DepthCache, window: Window, target: Generation) -> int:
    """Seen slots that the kernels over a window work on at once."""
    most = window.most(cache.keys.shape[0]) - 1
    return -(-most // -(-most // target.depth_slots)) if most else 1


def near_vmem(cache: DepthCache, group: int, window: Window, backward: bool = True) -> int:
    """Bytes of vector memory that the kernels over a window need for a token."""
    most, itemsize = window.most(cache.keys.shape[0]) - 1, cache.keys.dtype.itemsize
    fetched = most * (2 + 2 * group if backward else 2)
    rows = 6 * group + 4 if backward else 2 * group + 4  # read and written
    turned, sums = (2, group + 2) if backward else (group, group)  # scratch
    numbers = 4 * statistics_rows(group) * (2 * most + 4) if backward else 4 * 4 * max(8, group)
    return LANES * ((2 * (fetched + rows) + turned) * itemsize + 4 * sums) + numbers


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
    target, group = generation() or INTERPRETED, heads * size // cache.keys.shape[2]
    at_once = 1 if window.whole else _walked(cache, window, target)
    room = target.vmem - target.depth_backward[1] * spilled_vmem(group, at_once)
    if window.whole:
        if LANES * whole_vmem(cache, group, 1) > room:
            return f"{group} heads a key head are more than fit into the memory of a core"
    elif LANES * near_vmem(cache, group, window) > room:
        return f"{window.most(cache.keys.shape[0])} depths are seen, which is more than fit into the memory of a core"
    return None


def statistics_rows(group: int) -> int:
    """Rows that hold a logarithm and a product for every head of a group, in whole registers."""
    return -(-2 * group // SUBLANES) * SUBLANES


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
        "depth_attention_forward": (214, 257, 352, 98),
        "depth_attention_recompute": (214, 257, 352, 102),
        "depth_attention_backward": (330, 158, 262, 379, 454, 171, 282, 398, 534, 107),
    },
    "v5e": {
        "depth_attention_forward": (164, 194, 275, 124),
        "depth_attention_recompute": (164, 194, 275, 125),
        "depth_attention_backward": (376, 202, 326, 190, 304, 205),
    },
    "v5p": {
        "depth_attention_forward": (164, 192, 273, 125),
        "depth_attention_recompute": (164, 192, 273, 128),
        "depth_attention_backward": (376, 202, 332, 403, 516, 190, 300, 408, 573, 205),
    },
}
"""Bundles of the innermost loops, bfloat16, d = 128, one head, in program order, as jax 0.10.2 compiles them: the own
key, one slot of a block to all, backward of both kinds of block, the result. They take 256 tokens, on v4 backward 128.
A test compiles them again and fails on 5 % more."""

WINDOW_BUNDLES = {
    "v4": {
        "depth_window_forward": (43, 45, 220, 4, 512, 257, 356, 100),
        "depth_window_recompute": (43, 45, 220, 4, 512, 257, 356, 102),
        "depth_window_backward": (43, 43, 75, 75, 336, 4, 380, 159, 263, 4, 398, 170, 282, 107),
    },
    "v5e": {
        "depth_window_forward": (44, 44, 173, 4, 274, 197, 126),
        "depth_window_recompute": (44, 44, 173, 4, 274, 197, 125),
        "depth_window_backward": (45, 45, 72, 71, 385, 4, 328, 204, 4, 304, 190, 205),
    },
    "v5p": {
        "depth_window_forward": (45, 45, 185, 4, 322, 197, 275, 128),
        "depth_window_recompute": (45, 45, 173, 4, 322, 197, 275, 128),
        "depth_window_backward": (46, 46, 72, 72, 385, 4, 405, 204, 334, 4, 409, 190, 299, 206),
    },
}
"""The same of the kernels over a window of 4 depths, 2 apart: fetching, the own key, waiting; as many slots as are
walked at once, then one and, where there are three, two of them; the result."""
