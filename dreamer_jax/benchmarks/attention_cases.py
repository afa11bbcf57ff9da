"""The attentions' kernels at the paper's shapes (and with grouped queries), for `dreamer bench kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import pallas_kernels.sequence_attention.xla
from dreamer_jax.benchmarks.kernel_case import Case, Launch
from dreamer_jax.planning.schedule import Loop, Schedule
from pallas_kernels.depth_attention import WHOLE, DepthAttention, DepthCache, write_slot
from pallas_kernels.depth_attention.shapes import Blocks, backward_bytes, forward_bytes, statistics_rows
from pallas_kernels.sequence_attention import SequenceAttention
from pallas_kernels.sequence_attention.shapes import block_of, pairs_of
from pallas_kernels.tiles import Generation

DEPTH_ATTENTION = DepthAttention("pallas")
TOKENS, SIZE = 32768, 128
BFLOAT16 = 2
Read = Callable[[str], Schedule]


def attention_cases() -> list[Case]:
    """Depth attention at the paper's two depths and with grouped queries; sequence attention."""
    shapes = [(32, 1, 1), (16, 1, 1), (16, 4, 2)]
    depth = [make(*shape) for make in (_depth_forward, _depth_backward) for shape in shapes]
    return [*depth, _sequence(forward=True), _sequence(forward=False)]


def depth_arguments(slots: int, heads: int, kv_heads: int, key: jax.Array):
    """q, k, v with their heads side by side, as projections leave them and kernels take them; the cache."""
    keys = jax.random.split(key, 5)

    def normal(n, *shape):
        return jax.random.normal(keys[n], shape, jnp.bfloat16)

    rows = [normal(n, TOKENS, count * SIZE) for n, count in enumerate((heads, kv_heads, kv_heads))]
    return (*rows, DepthCache(*(normal(n, slots, TOKENS, kv_heads * SIZE) for n in (3, 4))))


def _depth_name(slots: int, heads: int, kv_heads: int) -> str:
    return f"T={TOKENS} L={slots} d={SIZE}" + (f" n={heads} kv={kv_heads}" if heads > 1 else "")


def _depth_forward(slots: int, heads: int, kv_heads: int) -> Case:
    def launches(read: Read, target: Generation) -> list[Launch]:
        schedule = read("depth_attention_forward")
        return [_forward_launch(schedule, slots, heads, kv_heads, depth, target) for depth in range(slots)]

    return Case(
        "depth_attention forward",
        _depth_name(slots, heads, kv_heads),
        lambda key: depth_arguments(slots, heads, kv_heads, key),
        kernel_forward,
        _plain_forward,
        launches,
        flops=0,  # none on the matrix unit
        least_bytes=sum(forward_bytes(TOKENS, heads, kv_heads, SIZE, BFLOAT16, depth) for depth in range(slots)),
        steps=range(slots),
        carried=3,
    )


def _depth_backward(slots: int, heads: int, kv_heads: int) -> Case:
    """The recomputed forward pass and the gradient, on the tape: what one depth of the backward scan takes."""

    def arguments(key):
        q, k, v, cache = depth_arguments(slots, heads, kv_heads, key)
        return q, k, v, cache, q, DEPTH_ATTENTION.start_tape(cache, heads, SIZE)

    def gradient(q, k, v, cache, d_out, tape, depth):
        def attend(q, k, v, tape):
            return kernel_forward(q, k, v, cache, depth, tape)[0]

        *rows, tape = jax.vjp(attend, q, k, v, tape)[1](d_out)
        return rows, tape

    def launches(read: Read, target: Generation) -> list[Launch]:
        recompute, pull = read("depth_attention_recompute"), read("depth_attention_backward")
        return [
            launch
            for depth in range(slots)
            for launch in (
                _forward_launch(recompute, slots, heads, kv_heads, depth, target, write=False),
                _pull_launch(pull, slots, heads, kv_heads, depth, target),
            )
        ]

    own = 2 * TOKENS * SIZE * BFLOAT16 * (heads + kv_heads)  # q, k, v and out of the recomputed pass
    return Case(
        "depth_attention backward",
        _depth_name(slots, heads, kv_heads),
        arguments,
        gradient,
        _plain_gradient,
        launches,
        flops=0,
        least_bytes=sum(
            own
            + TOKENS * SIZE * BFLOAT16 * 2 * kv_heads * depth
            + backward_bytes(TOKENS, heads, kv_heads, SIZE, BFLOAT16, depth, slots - 1 - depth)
            for depth in range(slots)
        ),
        steps=range(slots - 1, -1, -1),
        carried=5,
    )


def kernel_forward(q, k, v, cache, depth, tape=None, window=WHOLE):
    """The operation with heads side by side: the result and the cache."""
    queries, keys, values = (rows.reshape(TOKENS, -1, SIZE) for rows in (q, k, v))
    out, cache = DEPTH_ATTENTION(queries, keys, values, cache, depth, tape, window)
    return out.reshape(q.shape), cache


def plain(q: jax.Array, keys: jax.Array, values: jax.Array, depth: jax.Array) -> jax.Array:
    """What XLA makes best of on a TPU: multiply and reduce over [L, T, d], head by head; reads all slots."""
    group = q.shape[1] // keys.shape[-1]
    visible = (jnp.arange(keys.shape[0]) <= depth)[:, None]

    def head(n):
        k, v = (
            slots[:, :, n // group * SIZE : (n // group + 1) * SIZE].astype(jnp.float32) for slots in (keys, values)
        )
        logits = jnp.sum(q[:, n * SIZE : (n + 1) * SIZE].astype(jnp.float32) * k, axis=-1) * SIZE**-0.5
        weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=0)
        return jnp.sum(weights[..., None] * v, axis=0).astype(q.dtype)

    return jnp.concatenate([head(n) for n in range(q.shape[1] // SIZE)], axis=1)


def _plain_forward(q, k, v, cache, depth):
    cache = write_slot(cache, k, v, depth)
    return plain(q, *cache, depth), cache


def _plain_gradient(q, k, v, cache, d_out, tape, depth):
    """Push form: the cache's gradient, float32, is read and written at every depth."""
    del k, v, tape
    totals = DepthCache(*(jnp.zeros(part.shape, jnp.float32) for part in cache))
    out, vjp = jax.vjp(lambda q, keys, values: plain(q, keys, values, depth), q, *cache)
    d_q, *d_cache = vjp(d_out)
    return (out, d_q), jax.tree.map(lambda total, d: total + d.astype(jnp.float32), totals, DepthCache(*d_cache))


def _forward_launch(
    schedule: Schedule, slots: int, heads: int, kv_heads: int, depth: int, target: Generation, write: bool = True
) -> Launch:
    """Of the forward kernel that fills the new slot, or of the one that recomputes and returns logarithms instead."""
    tiles, blocks = _tiles(slots, heads, kv_heads, target)
    start, *pieces, finish = schedule.leaves
    steps = max(1, -(-depth // blocks.slots))
    walked = start.bundles + _walked(pieces, depth, blocks) + finish.bundles
    bundles = _launched(schedule, tiles, steps, walked, blocks)
    rows = 2 * heads + 2 * kv_heads * (steps * blocks.slots + (2 if write else 1))  # q, out; slots; k, v in (and out)
    return Launch(bundles, TOKENS * SIZE * BFLOAT16 * rows + (0 if write else 4 * heads * TOKENS))


def _pull_launch(schedule: Schedule, slots: int, heads: int, kv_heads: int, depth: int, target: Generation) -> Launch:
    tiles, blocks = _tiles(slots, heads, kv_heads, target, backward=True)
    start, *pieces, finish = schedule.leaves
    size, first_above = blocks.slots, (depth + 1) // blocks.slots
    below, above, seeing = -(-depth // size), -(-slots // size) - first_above, slots - 1 - depth
    walked = (
        start.bundles + _walked(pieces[:size], depth, blocks) + _walked(pieces[size:], seeing, blocks) + finish.bundles
    )
    bundles = _launched(schedule, tiles, max(1, below + above), walked, blocks)
    least = backward_bytes(TOKENS, heads, kv_heads, SIZE, BFLOAT16, depth, seeing)
    unwanted = kv_heads * (below * size - depth) + heads * (above * size - seeing)
    statistics = 4 * kv_heads * TOKENS * statistics_rows(heads // kv_heads) * (above * size + 1)
    return Launch(bundles, least + 2 * TOKENS * SIZE * BFLOAT16 * unwanted + statistics + 4 * heads * TOKENS)


def _walked(pieces: Sequence[Loop], count: int, blocks: Blocks) -> int:
    """Bundles that 128 tokens or so take for so many slots; `pieces` are the loops for one slot of a block, two, ..."""
    full, rest = divmod(count, blocks.slots)
    return full * pieces[-1].bundles + (pieces[rest - 1].bundles if rest else 0)


def _launched(schedule: Schedule, tiles: int, steps: int, walked: int, blocks: Blocks) -> int:
    """Bundles of a launch: so many steps for each tile, the innermost loops' apart."""
    grid = schedule.loops[0]
    return tiles * (steps * (grid.own - grid.optional) + grid.optional + blocks.tokens // blocks.rows * walked)


def _tiles(slots: int, heads: int, kv_heads: int, target: Generation, backward: bool = False) -> tuple[int, Blocks]:
    """(token tiles, times key heads) of a core, and the blocks."""
    row, group = jax.ShapeDtypeStruct((slots, TOKENS, kv_heads * SIZE), jnp.bfloat16), heads // kv_heads
    blocks = Blocks.of(DepthCache(row, row), group, target, backward)  # type: ignore[arg-type]
    return math.ceil(TOKENS // blocks.tokens * kv_heads / target.cores), blocks


def _sequence(forward: bool) -> Case:
    rows, length, heads, kv_heads = 8, 4096, 16, 8

    def arguments(key):
        keys = jax.random.split(key, 3)
        counts = (heads, kv_heads, kv_heads)
        q, k, v = (
            jax.random.normal(k, (rows, length, n, SIZE), jnp.bfloat16) for k, n in zip(keys, counts, strict=True)
        )
        return q, k, v, jnp.ones((rows, length), jnp.int32)

    def run(operation):
        def value(q, k, v, segment_ids, step):
            del step
            return operation(q, k, v, segment_ids)

        def gradient(q, k, v, segment_ids, step):
            out, vjp = jax.vjp(lambda q, k, v: value(q, k, v, segment_ids, step), q, k, v)
            return vjp(out)

        return value if forward else gradient

    def launches(read: Read, target: Generation) -> Sequence[Launch]:
        block = block_of(length, target.sequence_block)
        count, pairs = length // block, len(pairs_of(length, block))
        schedule = read("sequence_attention_forward").loops[0]
        diagonal, below, result = schedule.longest(3)
        each = schedule.own - diagonal - below - result  # the pipeline's
        bundles = count * (diagonal + result) + (pairs - count) * below + pairs * each
        launches = [Launch(rows * heads * bundles / target.cores, io + 4 * rows * heads * length)]
        if not forward:
            steps = rows * heads * pairs
            launches.append(Launch(read("splash_mha_dkv[a-z_]*").loops[0].bundles * steps / target.cores, 2 * io))
        return launches

    io = rows * length * SIZE * BFLOAT16 * 2 * (heads + kv_heads)
    products = 4 * rows * heads * length**2 / 2 * SIZE  # two products over the lower triangle
    return Case(
        f"sequence_attention {'forward' if forward else 'gradient'}",
        f"B={rows} S={length} n={heads} kv={kv_heads} d={SIZE}",
        arguments,
        run(SequenceAttention("pallas")),
        run(pallas_kernels.sequence_attention.xla.sequence_attention),
        launches,
        flops=products * (1 if forward else 3.5),
        least_bytes=io * (1 if forward else 3),
    )
