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
from pallas_kernels.depth_attention.tpu import Softmax, SoftmaxRefs, result_shapes, result_specs, running
from pallas_kernels.depth_attention.window import Window


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, window: Window, write: bool
) -> list[jax.Array]:
    """`tpu.attend` over the slots depth - s, depth - 2 s, ... of a window; the cache may be a `Ring` of its span."""
    layout, slots = NearLayout(q, k, cache, window), cache.keys.shape[0]
    kernel = functools.partial(_attend_kernel, layout=layout, slots=slots, dilation=window.dilation, write=write)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(layout.cores, layout.steps),
            in_specs=[layout.rows(layout.group * layout.size), *[layout.rows(layout.size)] * 2, HBM, HBM],
            out_specs=result_specs(layout, write),
            scratch_shapes=[*running(layout), *layout.buffers(cache)],
        ),
        out_shape=result_shapes(layout, q, cache, write),
        input_output_aliases={4: 1, 5: 2} if write else {},
        name="depth_window_forward" if write else "depth_window_recompute",
        **layout.compile(),
    )(_scalars(depth, slots, depth // window.dilation, layout), q, k, v, *cache)


def _scalars(depth: jax.Array, slots: int, seen: jax.Array, layout: NearLayout) -> jax.Array:
    """The slot of a depth, how many others are seen (at most `seen` are there), the depth itself: [3] int32."""
    return jnp.stack([depth % slots, jnp.minimum(seen, layout.most), depth]).astype(jnp.int32)


def _attend_kernel(scalars_ref, q_ref, k_ref, v_ref, keys_ref, values_ref, *rest, layout, slots, dilation, write):
    outs, rest = rest[: 3 if write else 2], rest[3 if write else 2 :]
    depth = scalars_ref[2]
    fetched = Fetched(
        layout,
        (keys_ref, values_ref),
        rest[3:],
        scalars_ref[1],
        lambda n: jax.lax.rem(depth - (n + 1) * dilation, slots),
    )
    fetched.ahead()
    first = Softmax(SoftmaxRefs(q_ref, k_ref, v_ref, None, None, *rest[:3]), layout.blocks, layout.size, layout.group)
    first.start(outs[1:] if write else ())
    keys, values = fetched.wait()
    softmax = Softmax(
        SoftmaxRefs(q_ref, k_ref, v_ref, keys, values, *rest[:3]), layout.blocks, layout.size, layout.group
    )
    fetched.for_seen(softmax.absorb)
    softmax.finish(outs[0], None if write else outs[1])
