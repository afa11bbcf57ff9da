"""Depth attention over windows and with dilation, at the paper's shapes, for `dreamer bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dreamer_jax.benchmarks.attention_cases import (
    BFLOAT16,
    DEPTH_ATTENTION,
    SIZE,
    TOKENS,
    Read,
    depth_arguments,
    kernel_forward,
    plain,
)
from dreamer_jax.benchmarks.kernel_case import Case, Launch
from dreamer_jax.planning.schedule import Loop, Schedule
from pallas_kernels.depth_attention import DepthCache, Window, write_slot
from pallas_kernels.depth_attention.shapes import (
    Blocks,
    backward_bytes,
    forward_bytes,
    near_blocks,
    statistics_rows,
)
from pallas_kernels.depth_attention.windowed import seen
from pallas_kernels.tiles import Generation


def window_cases() -> list[Case]:
    """Windows and dilations of models of 16 and 32 depths, and with grouped queries."""
    windows = [
        (16, 1, 1, Window(4)),
        (16, 1, 1, Window(4, 2)),
        (32, 1, 1, Window(8)),
        (32, 1, 1, Window(0, 2)),
        (16, 4, 2, Window(4, 2)),
    ]
    shapes = [_Shape(*its) for its in windows]
    return [*map(_forward, shapes), *map(_backward, shapes)]


class _Shape:
    """A window over a cache of so many slots, and what a depth sees of it."""

    def __init__(self, slots: int, heads: int, kv_heads: int, window: Window) -> None:
        self.slots, self.heads, self.kv_heads, self.window = slots, heads, kv_heads, window
        words = f"T={TOKENS} d={SIZE} L={slots}" + (f" n={heads} kv={kv_heads}" if heads > 1 else "")
        self.name = words + f" w={window.size}" * (window.size > 0) + f" s={window.dilation}" * (window.dilation > 1)
        self.counts = heads, kv_heads, SIZE, BFLOAT16

    def below(self, depth: int) -> int:
        """Slots that are read beside its own."""
        return min(self.window.most(self.slots) - 1, depth // self.window.dilation)

    def above(self, depth: int) -> int:
        """Deeper depths that see this one."""
        return self.below(self.slots - 1 - depth)

    def arguments(self, key: jax.Array):
        """As of plain depth attention."""
        return depth_arguments(self.slots, self.heads, self.kv_heads, key)


def _forward(shape: _Shape) -> Case:
    def launches(read: Read, target: Generation) -> list[Launch]:
        schedule = read("depth_window_forward")
        return [_forward_launch(schedule, shape, depth, target) for depth in range(shape.slots)]

    def kernel(q, k, v, cache, depth):
        return kernel_forward(q, k, v, cache, depth, window=shape.window)

    def xla(q, k, v, cache, depth):
        cache = write_slot(cache, k, v, depth)
        return plain(q, *seen(cache, depth, shape.window), depth // shape.window.dilation), cache

    return Case(
        "depth_window forward",
        shape.name,
        shape.arguments,
        kernel,
        xla,
        launches,
        flops=0,  # none on the matrix unit
        least_bytes=sum(forward_bytes(TOKENS, *shape.counts, shape.below(depth)) for depth in range(shape.slots)),
        steps=range(shape.slots),
        carried=3,
    )


def _backward(shape: _Shape) -> Case:
    """The recomputed forward pass and the gradient, on the tape: what one depth of the backward scan takes."""

    def arguments(key):
        q, k, v, cache = shape.arguments(key)
        return q, k, v, cache, q, DEPTH_ATTENTION.start_tape(cache, shape.heads, SIZE, shape.window)

    def gradient(q, k, v, cache, d_out, tape, depth):
        def attend(q, k, v, tape):
            return kernel_forward(q, k, v, cache, depth, tape, shape.window)[0]

        *rows, tape = jax.vjp(attend, q, k, v, tape)[1](d_out)
        return rows, tape

    def xla(q, k, v, cache, d_out, tape, depth):
        """Push form: the float32 gradient of what is seen is written at every depth."""
        del k, v, tape
        newest = depth // shape.window.dilation
        attend = lambda q, keys, values: plain(q, keys, values, newest)  # noqa: E731
        out, vjp = jax.vjp(attend, q, *seen(cache, depth, shape.window))
        d_q, *d_kept = vjp(d_out)
        return (out, d_q), DepthCache(*(part.astype(jnp.float32) for part in d_kept))

    def launches(read: Read, target: Generation) -> list[Launch]:
        recompute, pull = read("depth_window_recompute"), read("depth_window_backward")
        depths = range(shape.slots)
        return [
            *(_forward_launch(recompute, shape, depth, target, write=False) for depth in depths),
            *(_pull_launch(pull, shape, depth, target) for depth in depths),
        ]

    own = 2 * TOKENS * SIZE * BFLOAT16 * (shape.heads + shape.kv_heads)  # q, k, v and out of the recomputed pass
    return Case(
        "depth_window backward",
        shape.name,
        arguments,
        gradient,
        xla,
        launches,
        flops=0,
        least_bytes=sum(
            own
            + TOKENS * SIZE * BFLOAT16 * 2 * shape.kv_heads * shape.below(depth)
            + backward_bytes(TOKENS, *shape.counts, shape.below(depth), shape.above(depth))
            for depth in range(shape.slots)
        ),
        steps=range(shape.slots - 1, -1, -1),
        carried=5,
    )


def _forward_launch(schedule: Schedule, shape: _Shape, depth: int, target: Generation, write: bool = True) -> Launch:
    """Of the forward kernel that fills the new slot, or of the one that recomputes and returns logarithms instead."""
    steps, blocks = _steps(shape, target)
    _, ahead, own, wait, *pieces, finish = schedule.leaves
    count, trips = shape.below(depth), blocks.tokens // blocks.rows
    fetched = count * (ahead.bundles + wait.bundles)
    walked = _walked(schedule, pieces, count, blocks)
    least = forward_bytes(TOKENS, *shape.counts, count)
    if not write:  # logarithms instead of two slots
        least += 4 * shape.heads * TOKENS - TOKENS * SIZE * BFLOAT16 * 2 * shape.kv_heads
    return Launch(steps * (schedule.loops[0].own + fetched + trips * (own.bundles + finish.bundles) + walked), least)


def _pull_launch(schedule: Schedule, shape: _Shape, depth: int, target: Generation) -> Launch:
    steps, blocks = _steps(shape, target, backward=True)
    _, lower, _, upper, own, *rest = schedule.leaves
    *rest, finish = rest
    (wait_lower, *pieces), (wait_upper, *pieces_above) = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    below, above, trips = shape.below(depth), shape.above(depth), blocks.tokens // blocks.rows
    fetched = below * (lower.bundles + wait_lower.bundles) + above * (upper.bundles + wait_upper.bundles)
    walked = _walked(schedule, pieces, below, blocks) + _walked(schedule, pieces_above, above, blocks)
    rows = shape.kv_heads * statistics_rows(shape.heads // shape.kv_heads) * (above + 1)
    statistics = 4 * TOKENS * (rows + shape.heads)
    least = backward_bytes(TOKENS, *shape.counts, below, above)
    return Launch(
        steps * (schedule.loops[0].own + fetched + trips * (own.bundles + finish.bundles) + walked), least + statistics
    )


def _steps(shape: _Shape, target: Generation, backward: bool = False) -> tuple[int, Blocks]:
    """Blocks of tokens and key heads of a core, and the blocks."""
    row = jax.ShapeDtypeStruct((shape.slots, TOKENS, shape.kv_heads * SIZE), jnp.bfloat16)
    cache = DepthCache(row, row)  # type: ignore[arg-type]
    blocks = near_blocks(cache, shape.heads // shape.kv_heads, shape.window, target, backward)
    return TOKENS // blocks.tokens * shape.kv_heads // target.cores, blocks


def _walked(schedule: Schedule, pieces: Sequence[Loop], count: int, blocks: Blocks) -> int:
    """Bundles of walking over so many slots, for a block of tokens; `pieces` are the loops over the rows of a whole
    piece, of one slot, two, ..."""
    full, rest = divmod(count, blocks.slots)
    around = [loop for loop in schedule.loops if loop.start < pieces[0].start and loop.level < pieces[0].level]
    rows = full * pieces[0].bundles + (pieces[rest].bundles if rest else 0)
    return full * around[-1].own + blocks.tokens // blocks.rows * rows
