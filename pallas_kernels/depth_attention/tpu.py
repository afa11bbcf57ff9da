"""Depth attention on a TPU, forward: slots past the depth are never fetched, and the new slot is written in place.

Softmax and sums are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.layout import F32, Layout, column_to_row, for_rows, for_slots, head_of, row_dot
from pallas_kernels.depth_attention.shapes import Blocks


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
    filled = layout.slots_of(layout.size, lambda i, h, j, depth: (j, i, h))
    steps = jnp.maximum(1, pl.cdiv(depth, layout.blocks.slots))
    return pl.pallas_call(
        functools.partial(_attend_kernel, blocks=layout.blocks, size=layout.size, group=layout.group, write=write),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=layout.grid(steps),
            in_specs=[layout.rows(layout.group * layout.size), *[layout.rows(layout.size)] * 2, filled, filled],
            out_specs=result_specs(layout, write),
            scratch_shapes=running(layout),
        ),
        out_shape=result_shapes(layout, q, cache, write),
        input_output_aliases={4: 1, 5: 2} if write else {},
        name="depth_attention_forward" if write else "depth_attention_recompute",
        **layout.compile(),
    )(jnp.reshape(depth, (1,)).astype(jnp.int32), q, k, v, *cache)


def result_specs(layout: Layout, write: bool) -> list[pl.BlockSpec]:
    """Of what `attend` returns; the first prefetched scalar is the slot to write."""
    rest = [layout.slot(layout.size)] * 2 if write else [layout.logs()]
    return [layout.rows(layout.group * layout.size), *rest]


def result_shapes(layout: Layout, q: jax.Array, cache: DepthCache, write: bool) -> list[jax.ShapeDtypeStruct]:
    """The same, as arrays."""
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (q, *cache)]
    return shapes if write else [shapes[0], jax.ShapeDtypeStruct((layout.kv_heads, layout.group, q.shape[0]), F32)]


def running(layout: Layout) -> list[Any]:
    """Scratch of `Softmax`."""
    return [pltpu.VMEM((layout.group, layout.blocks.tokens, layout.size), F32)] * 3


def _attend_kernel(depth_ref, q_ref, k_ref, v_ref, keys_ref, values_ref, *rest, blocks, size, group, write):
    step, depth = pl.program_id(2), depth_ref[0]
    outs, scratch = rest[: 3 if write else 2], rest[3 if write else 2 :]
    softmax = Softmax(SoftmaxRefs(q_ref, k_ref, v_ref, keys_ref, values_ref, *scratch), blocks, size, group)
    pl.when(step == 0)(lambda: softmax.start(outs[1:] if write else ()))
    for_slots(blocks, step * blocks.slots, 0, depth, softmax.absorb)
    pl.when(step == pl.num_programs(2) - 1)(lambda: softmax.finish(outs[0], None if write else outs[1]))


class SoftmaxRefs(NamedTuple):
    """References of `Softmax`: inputs and scratch."""

    q: Any
    k: Any
    v: Any
    keys: Any
    values: Any
    top: Any
    total: Any
    sum: Any


class Softmax:
    """The steps of the forward kernel on one block of tokens: a softmax over slots as they come."""

    def __init__(self, refs: SoftmaxRefs, blocks: Blocks, size: int, group: int) -> None:
        self.refs, self.blocks, self.size, self.group = refs, blocks, size, group
        self.scale = size**-0.5

    def start(self, slots: Sequence[Any]) -> None:
        """This depth's own key and value, which also go to the cache's `slots`, if there are any."""
        refs = self.refs
        for slot, own in zip(slots, (refs.k, refs.v), strict=bool(slots)):
            slot[...] = own[...]
        for_rows(self.blocks, self._own_key)

    def _own_key(self, rows):
        refs = self.refs
        k, v = refs.k[rows, :].astype(F32), refs.v[rows, :].astype(F32)
        for g in range(self.group):
            logit = row_dot(head_of(refs.q, rows, g, self.size) * self.scale, k)
            refs.top[g, rows, :] = jnp.broadcast_to(logit, (self.blocks.rows, refs.top.shape[-1]))
            refs.total[g, rows, :] = jnp.ones((self.blocks.rows, refs.total.shape[-1]), F32)
            refs.sum[g, rows, :] = v

    def absorb(self, rows: Any, wanted: Any) -> None:
        """The keys and values of `wanted` slots."""
        refs = self.refs
        for g in range(self.group):
            q = head_of(refs.q, rows, g, self.size) * self.scale
            logits = [row_dot(q, refs.keys[i, rows, :].astype(F32)) for i in wanted]
            top = refs.top[g, rows, :]
            new_top = functools.reduce(jnp.maximum, logits, top)
            shrink = jnp.exp(top - new_top)
            total, summed = refs.total[g, rows, :] * shrink, refs.sum[g, rows, :] * shrink
            for i, logit in zip(wanted, logits, strict=True):
                weight = jnp.exp(logit - new_top)
                total, summed = total + weight, summed + weight * refs.values[i, rows, :].astype(F32)
            refs.top[g, rows, :], refs.total[g, rows, :], refs.sum[g, rows, :] = new_top, total, summed

    def finish(self, out: Any, log: Any = None) -> None:
        """The result, and where it is asked for the logarithm of the denominator."""
        refs, size = self.refs, self.size
        for g in range(self.group):
            out[:, g * size : (g + 1) * size] = (refs.sum[g] / refs.total[g]).astype(out.dtype)
            if log is not None:
                log[g : g + 1, :] = column_to_row(refs.top[g] + jnp.log(refs.total[g]))
