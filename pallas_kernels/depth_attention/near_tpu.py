"""Depth attention over a window or with dilation on a TPU, forward and backward: the kernels of tpu.py and pull.py,
each over the few slots that a depth sees, or that see it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.near import HBM, Fetched, NearLayout
from pallas_kernels.depth_attention.pull import Pull, PullRefs, Queries, scratch
from pallas_kernels.depth_attention.tpu import Softmax, SoftmaxRefs, result_shapes, result_specs, running
from pallas_kernels.depth_attention.window import Window


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, window: Window, write: bool
) -> list[jax.Array]:
    """`tpu.attend` over the slots depth - s, depth - 2 s, ... of a window; the cache may be a `Ring` of its span."""
    layout, slots = NearLayout(q, k, cache, window), cache.keys.shape[0]
    return pl.pallas_call(
        functools.partial(_attend_kernel, layout=layout, write=write),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(layout.cores, layout.steps),
            in_specs=[layout.rows(layout.group * layout.size), *[layout.rows(layout.size)] * 2, HBM, HBM],
            out_specs=result_specs(layout, write),
            scratch_shapes=[*running(layout, q.dtype), *layout.buffers(cache)],
        ),
        out_shape=result_shapes(layout, q, cache, write),
        input_output_aliases={4: 1, 5: 2} if write else {},
        name="depth_window_forward" if write else "depth_window_recompute",
        **layout.compile(),
    )(jnp.stack([depth % slots, depth, layout.seen(depth)]).astype(jnp.int32), q, k, v, *cache)


def _attend_kernel(scalars_ref, q_ref, k_ref, v_ref, keys_ref, values_ref, *rest, layout, write):
    outs, running, buffers = rest[: 3 if write else 2], rest[-7:-3], rest[-3:]
    below = Fetched(layout, (keys_ref, values_ref), buffers, scalars_ref[2], layout.below(scalars_ref[1]))
    refs = SoftmaxRefs(q_ref, k_ref, v_ref, *below.parts, *running)
    softmax = Softmax(refs, layout.blocks, layout.size, layout.group)
    below.ahead()
    softmax.start(outs[1:] if write else ())
    below.wait()
    below.for_seen(softmax.absorb)
    softmax.finish(outs[0], None if write else outs[1])


def pull_gradients(
    rows: tuple[jax.Array, ...],
    logs: jax.Array,
    cache: DepthCache,
    tape: Queries,
    depth: jax.Array,
    window: Window,
) -> tuple[tuple[jax.Array, ...], Queries]:
    """`pull.pull_gradients` with the slots that a depth sees, and the queries at depth + s, depth + 2 s, ..."""
    q, k = rows[:2]
    layout = NearLayout(q, k, cache, window, backward=True)
    left = tape.queries, tape.d_outs, tape.statistics
    above = layout.seen(cache.keys.shape[0] - 1 - depth)
    wide, narrow = layout.rows(layout.group * layout.size), layout.rows(layout.size)
    slot = [layout.turned_slot(part.shape[1] // layout.kv_heads) for part in left]
    results = pl.pallas_call(
        functools.partial(_pull_kernel, layout=layout, ring=tape.queries.shape[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(layout.cores, layout.steps),
            in_specs=[wide, narrow, narrow, wide, wide, layout.logs(), *[HBM] * 5],
            out_specs=[wide, narrow, narrow, *slot],
            scratch_shapes=[*scratch(layout, q.dtype), *layout.buffers(cache), *layout.buffers(left, turned=True)],
        ),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (q, k, k, *left)],
        input_output_aliases={9: 3, 10: 4, 11: 5},
        name="depth_window_backward",
        **layout.compile(),
    )(
        jnp.stack([depth % tape.queries.shape[0], depth, layout.seen(depth), above]).astype(jnp.int32),
        *rows,
        logs,
        *cache,
        *left,
    )
    return tuple(results[:3]), Queries(*results[3:])


def _pull_kernel(scalars_ref, *refs, layout, ring):
    arguments, buffers = refs[:-7], refs[-7:]
    depth, seen, seeing = (scalars_ref[n] for n in range(1, 4))

    def above(n):
        return jax.lax.rem(depth + (n + 1) * layout.dilation, ring)

    lower = Fetched(layout, arguments[6:8], buffers[:3], seen, layout.below(depth))
    upper = Fetched(layout, arguments[8:11], buffers[3:], seeing, above, turned=True)
    pull = Pull(
        PullRefs(*arguments[:6], *lower.parts, *upper.parts, *arguments[11:]), layout.blocks, layout.size, layout.group
    )
    lower.ahead()
    upper.ahead()
    pull.start()
    lower.wait()
    lower.for_seen(pull.queries_look_down)
    upper.wait()
    upper.for_seen(pull.keys_are_seen)
    pull.finish()
