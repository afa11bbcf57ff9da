"""Depth attention on a TPU, forward: slots past the depth are never fetched, and the new slot is written in place.

Softmax and sums are float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.layout import F32, Layout, columns_of, dot, for_slots, for_tokens, turned
from pallas_kernels.depth_attention.shapes import Blocks

LOG2_E = math.log2(math.e)


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
        logarithm of the softmax's denominator to base 2, float32 [kv, n/kv, T].
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
            scratch_shapes=running(layout, q.dtype),
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


def running(layout: Layout, dtype: Any) -> list[Any]:
    """Scratch of `Softmax`."""
    group, tokens = layout.group, layout.blocks.tokens
    rows, turned = (group, tokens), (group, layout.size, tokens)
    return [pltpu.VMEM(rows, F32), pltpu.VMEM(rows, F32), pltpu.VMEM(turned, F32), pltpu.VMEM(turned, dtype)]


def _attend_kernel(depth_ref, q_ref, k_ref, v_ref, keys_ref, values_ref, *rest, blocks, size, group, write):
    step, depth = pl.program_id(2), depth_ref[0]
    outs, scratch = rest[: 3 if write else 2], rest[3 if write else 2 :]
    softmax = Softmax(SoftmaxRefs(q_ref, k_ref, v_ref, keys_ref, values_ref, *scratch), blocks, size, group)
    pl.when(step == 0)(lambda: softmax.start(outs[1:] if write else ()))
    for_slots(blocks, jnp.minimum(depth - step * blocks.slots, blocks.slots), softmax.absorb)
    pl.when(step == pl.num_programs(2) - 1)(lambda: softmax.finish(outs[0], None if write else outs[1]))


class SoftmaxRefs(NamedTuple):
    """References of `Softmax`: inputs, and scratch, in which tokens are in lanes."""

    q: Any
    k: Any
    v: Any
    keys: Any
    values: Any
    top: Any
    total: Any
    sum: Any
    turned_q: Any


class Softmax:
    """The steps of the forward kernel on one block of tokens: a softmax over slots as they come."""

    def __init__(self, refs: SoftmaxRefs, blocks: Blocks, size: int, group: int) -> None:
        self.refs, self.blocks, self.size, self.group = refs, blocks, size, group
        self.scale = size**-0.5 * LOG2_E

    def start(self, slots: Sequence[Any]) -> None:
        """This depth's own key and value, which also go to the cache's `slots`, if there are any."""
        refs = self.refs
        for slot, own in zip(slots, (refs.k, refs.v), strict=bool(slots)):
            slot[...] = own[...]
        for_tokens(self.blocks, self._own_key)

    def _own_key(self, tokens):
        refs = self.refs
        k, v = (turned(ref, tokens).astype(F32) for ref in (refs.k, refs.v))
        for g in range(self.group):
            q = turned(refs.q, tokens, columns_of(g, self.size))
            refs.turned_q[g, :, tokens], refs.sum[g, :, tokens] = q, v
            logit = dot(q.astype(F32), k) * self.scale
            refs.top[g : g + 1, tokens], refs.total[g : g + 1, tokens] = logit, jnp.ones_like(logit)

    def absorb(self, tokens: Any, wanted: Any) -> None:
        """The keys and values of `wanted` slots."""
        refs, heads = self.refs, range(self.group)
        queries = [refs.turned_q[g, :, tokens].astype(F32) for g in heads]
        logits: list[list[jax.Array]] = [[] for _ in heads]
        for i in wanted:
            k = turned(refs.keys, i, tokens).astype(F32)
            for its, q in zip(logits, queries, strict=True):
                its.append(dot(q, k) * self.scale)
        weights, sums = [], []
        for g, its in enumerate(logits):
            head = slice(g, g + 1)
            top = refs.top[head, tokens]
            new_top = functools.reduce(jnp.maximum, its, top)
            shrink = jnp.exp2(top - new_top)
            weights.append([jnp.exp2(logit - new_top) for logit in its])
            refs.top[head, tokens] = new_top
            refs.total[head, tokens] = refs.total[head, tokens] * shrink + sum(weights[g])
            sums.append(refs.sum[g, :, tokens] * shrink)
        for n, i in enumerate(wanted):
            v = turned(refs.values, i, tokens).astype(F32)
            sums = [summed + its[n] * v for summed, its in zip(sums, weights, strict=True)]
        for g, summed in enumerate(sums):
            refs.sum[g, :, tokens] = summed

    def finish(self, out: Any, log: Any = None) -> None:
        """The result, and where it is asked for the logarithm of the denominator."""
        for_tokens(self.blocks, functools.partial(self._result, out, log))

    def _result(self, out, log, tokens):
        refs = self.refs
        for g in range(self.group):
            total = refs.total[g : g + 1, tokens]
            result = (refs.sum[g, :, tokens] * (1 / total)).astype(out.dtype)
            out[tokens, columns_of(g, self.size)] = jnp.transpose(result)
            if log is not None:
                log[g : g + 1, tokens] = refs.top[g : g + 1, tokens] + jnp.log2(total)
