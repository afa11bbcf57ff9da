"""Depth attention on a TPU, forward: slots past the depth are never fetched, and the new slot is written in place.

Softmax and sums are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.layout import F32, Layout, column_to_row, for_rows, for_slots, head_of, row_dot


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, write: bool
) -> list[jax.Array]:
    """Attention over slots 0 .. depth-1 of the cache, and k and v.

    Args:
        q: [T, n d]; k, v: [T, kv d]; heads side by side.
        cache: [L, T, kv d] each.
        depth: scalar int32.
        write: put k and v into slot `depth`, in place. Otherwise it is a recomputation for the backward pass.

    Returns:
        out [T, n d] and, with `write`, the cache's keys and values; otherwise what the backward pass asks for, the
        logarithm of the softmax's denominator, float32 [kv, n/kv, T].
    """
    layout = Layout(q, k, cache)
    group, size, tokens = layout.group, layout.size, layout.blocks.tokens
    filled = layout.slots_of(size, lambda i, h, j, depth: (j, i, h))
    steps = jnp.maximum(1, pl.cdiv(depth, layout.blocks.slots))
    out_specs, out_shapes = [layout.rows(group * size)], [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if write:
        out_specs += [layout.slot(size)] * 2
        out_shapes += [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cache]
    else:
        out_specs += [layout.logs()]
        out_shapes += [jax.ShapeDtypeStruct((layout.kv_heads, group, q.shape[0]), F32)]
    running = pltpu.VMEM((group, tokens, size), F32)
    return pl.pallas_call(
        functools.partial(_attend_kernel, blocks=layout.blocks, size=size, group=group, write=write),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=layout.grid(steps),
            in_specs=[layout.rows(group * size), layout.rows(size), layout.rows(size), filled, filled],
            out_specs=out_specs,
            scratch_shapes=[running] * 3,
        ),
        out_shape=out_shapes,
        input_output_aliases={4: 1, 5: 2} if write else {},
        name="depth_attention_forward" if write else "depth_attention_recompute",
        **layout.compile(),
    )(jnp.reshape(depth, (1,)).astype(jnp.int32), q, k, v, *cache)


def _attend_kernel(depth_ref, q_ref, k_ref, v_ref, keys_ref, values_ref, *rest, blocks, size, group, write):
    out_ref, *slots_or_log, top_ref, total_ref, sum_ref = rest
    step, depth = pl.program_id(2), depth_ref[0]
    scale = size**-0.5

    @pl.when(step == 0)
    def start():
        if write:
            slots_or_log[0][...], slots_or_log[1][...] = k_ref[...], v_ref[...]

        def body(rows):
            k, v = k_ref[rows, :].astype(F32), v_ref[rows, :].astype(F32)
            for g in range(group):
                logit = row_dot(head_of(q_ref, rows, g, size) * scale, k)
                top_ref[g, rows, :] = jnp.broadcast_to(logit, (blocks.rows, top_ref.shape[-1]))
                total_ref[g, rows, :] = jnp.ones((blocks.rows, total_ref.shape[-1]), F32)
                sum_ref[g, rows, :] = v

        for_rows(blocks, body)

    def absorb(rows, wanted):
        for g in range(group):
            q = head_of(q_ref, rows, g, size) * scale
            logits = [row_dot(q, keys_ref[i, rows, :].astype(F32)) for i in wanted]
            top = top_ref[g, rows, :]
            new_top = functools.reduce(jnp.maximum, logits, top)
            shrink = jnp.exp(top - new_top)
            total, summed = total_ref[g, rows, :] * shrink, sum_ref[g, rows, :] * shrink
            for i, logit in zip(wanted, logits, strict=True):
                weight = jnp.exp(logit - new_top)
                total, summed = total + weight, summed + weight * values_ref[i, rows, :].astype(F32)
            top_ref[g, rows, :], total_ref[g, rows, :], sum_ref[g, rows, :] = new_top, total, summed

    for_slots(blocks, step * blocks.slots, 0, depth, absorb)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish():
        for g in range(group):
            out_ref[:, g * size : (g + 1) * size] = (sum_ref[g] / total_ref[g]).astype(out_ref.dtype)
            if not write:
                slots_or_log[0][g : g + 1, :] = column_to_row(top_ref[g] + jnp.log(total_ref[g]))
