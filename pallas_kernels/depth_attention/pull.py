"""The gradient of depth attention on a TPU, in pull form: what a key gets is summed from what deeper depths left.

Autodiff would push: every depth would read, add to and write the float32 gradient of all shallower slots.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.layout import F32, Layout, columns_of, dot, for_slots, for_tokens, turned
from pallas_kernels.depth_attention.shapes import Blocks, statistics_rows
from pallas_kernels.depth_attention.tpu import LOG2_E
from pallas_kernels.depth_attention.window import WHOLE, Window
from pallas_kernels.tape import Tape


class Queries(flax.struct.PyTreeNode, Tape):
    """What deeper depths have asked of their keys, and what came of it; filled above the present depth.

    With a window, of the R nearest depths only: depth l is in slot l mod R. Tokens are last, as the kernel wants them.

    Attributes:
        queries, d_outs: queries and output gradients, [L, n d, T], compute dtype.
        statistics: [L, kv r, T] float32; of head g of a group, in row 2 g the logarithm of the softmax's denominator to
            base 2, in the next the product of out and d_out.
    """

    queries: jax.Array
    d_outs: jax.Array
    statistics: jax.Array


def start_tape(cache: DepthCache, heads: int, size: int, window: Window = WHOLE) -> Queries:
    """The empty tape of `pull_gradients` for `heads` query heads of `size`; with a window, of its span's slots."""
    slots, tokens, width = cache.keys.shape
    slots, kv_heads = window.span(slots), width // size
    rows = jnp.zeros((slots, heads * size, tokens), cache.keys.dtype)
    statistics = kv_heads * statistics_rows(heads // kv_heads)
    return Queries(rows, rows, jnp.zeros((slots, statistics, tokens), F32))


def pull_gradients(
    rows: tuple[jax.Array, ...],
    logs: jax.Array,
    cache: DepthCache,
    tape: Queries,
    depth: jax.Array,
) -> tuple[tuple[jax.Array, ...], Queries]:
    """The gradient of one depth, in descending order of depths, in pull form.

    What a key gets from deeper queries is summed here from the queries and output gradients those left on the tape,
    rather than added to a gradient of the whole cache at every depth.

    Args:
        rows: q [T, n d], k, v [T, kv d], out, d_out [T, n d] of this depth.
        logs: as `attend` returned them.
        cache: filled below `depth`.
        tape: filled above `depth`.
        depth: scalar int32.

    Returns:
        (d_q [T, n d], d_k, d_v [T, kv d]); the tape with slot `depth` filled, in place.
    """
    q, k = rows[:2]
    slots = cache.keys.shape[0]
    layout = Layout(q, k, cache, backward=True)
    left = tape.queries, tape.d_outs, tape.statistics
    group, size, of_slots = layout.group, layout.size, layout.blocks.slots
    below = pl.cdiv(depth, of_slots)
    first_above = jax.lax.div(depth + 1, of_slots)
    above = jnp.maximum(pl.cdiv(slots, of_slots) - first_above, 0)

    def lower(i, h, j, s):
        return jnp.clip(j, 0, jnp.maximum(s[1] - 1, 0)), i, h

    def upper(i, h, j, s):
        last = (slots - 1) // of_slots
        return jnp.minimum(s[2] + jnp.maximum(j - s[1], 0), last), i, h

    wide, narrow, filled = layout.rows(group * size), layout.rows(size), layout.slots_of(size, lower)
    rows_of_tape = group * size, group * size, statistics_rows(group)
    taped = [layout.turned_slots_of(its, upper) for its in rows_of_tape]
    slot = [layout.turned_slot(its) for its in rows_of_tape]
    results = pl.pallas_call(
        functools.partial(_pull_kernel, blocks=layout.blocks, size=size, group=group, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=layout.grid(jnp.maximum(1, below + above)),
            in_specs=[wide, narrow, narrow, wide, wide, layout.logs(), filled, filled, *taped],
            out_specs=[wide, narrow, narrow, *slot],
            scratch_shapes=scratch(layout, q.dtype),
        ),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (q, k, k, *left)],
        input_output_aliases={9: 3, 10: 4, 11: 5},
        name="depth_attention_backward",
        **layout.compile(),
    )(jnp.stack([depth, below, first_above]).astype(jnp.int32), *rows, logs, *cache, *left)
    return tuple(results[:3]), Queries(*results[3:])


def scratch(layout: Layout, dtype: Any) -> list[Any]:
    """Of `Pull`."""
    turned = layout.size, layout.blocks.tokens
    own, total = pltpu.VMEM(turned, dtype), pltpu.VMEM(turned, F32)
    return [own, own, pltpu.VMEM((layout.group, *turned), F32), total, total]


def _pull_kernel(scalars_ref, *refs, blocks, size, group, slots):
    step, depth, below = pl.program_id(2), scalars_ref[0], scalars_ref[1]
    first_above = (scalars_ref[2] + step - below) * blocks.slots
    pull = Pull(PullRefs(*refs), blocks, size, group)

    pl.when(step == 0)(pull.start)

    @pl.when(step < below)
    def look_down():
        for_slots(blocks, jnp.minimum(depth - step * blocks.slots, blocks.slots), pull.queries_look_down)

    @pl.when((step >= below) & (first_above < slots))
    def look_up():
        count = jnp.minimum(first_above + blocks.slots - 1 - depth, blocks.slots)
        for_slots(blocks, count, pull.keys_are_seen, last=True)

    pl.when(step == pl.num_programs(2) - 1)(pull.finish)


class PullRefs(NamedTuple):
    """References of the backward kernel: inputs, outputs and scratch, in this order; scratch and tape are turned."""

    q: Any
    k: Any
    v: Any
    out: Any
    d_out: Any
    log: Any
    keys: Any
    values: Any
    queries: Any
    d_outs: Any
    statistics: Any
    d_q: Any
    d_k: Any
    d_v: Any
    query_slot: Any
    d_out_slot: Any
    statistics_slot: Any
    own_k: Any
    own_v: Any
    sum_q: Any
    sum_k: Any
    sum_v: Any


class Pull:
    """The steps of the backward kernel on one block of tokens."""

    def __init__(self, refs: PullRefs, blocks: Blocks, size: int, group: int) -> None:
        self.refs, self.blocks, self.size, self.group = refs, blocks, size, group
        self.scale = size**-0.5

    def start(self) -> None:
        """This depth's slots of the tape, and its own key's share of the sums."""
        for_tokens(self.blocks, self._own_key)

    def _own_key(self, tokens):
        refs = self.refs
        refs.own_k[:, tokens], refs.own_v[:, tokens] = turned(refs.k, tokens), turned(refs.v, tokens)
        k, v = refs.own_k[:, tokens].astype(F32), refs.own_v[:, tokens].astype(F32)
        d_k, d_v = jnp.zeros_like(k), jnp.zeros_like(v)
        for g in range(self.group):
            columns = columns_of(g, self.size)
            refs.query_slot[columns, tokens] = turned(refs.q, tokens, columns)
            refs.d_out_slot[columns, tokens] = turned(refs.d_out, tokens, columns)
            q, d_out = self._asked(refs.query_slot, refs.d_out_slot, (), g, tokens)
            log, product = refs.log[g : g + 1, tokens], dot(d_out, turned(refs.out, tokens, columns).astype(F32))
            refs.statistics_slot[2 * g : 2 * g + 1, tokens] = log
            refs.statistics_slot[2 * g + 1 : 2 * g + 2, tokens] = product
            weight, d_logit = self._weighed(q, d_out, k, v, log, product)
            refs.sum_q[g, :, tokens] = d_logit * k
            d_k, d_v = d_k + d_logit * q, d_v + weight * d_out
        refs.sum_k[:, tokens], refs.sum_v[:, tokens] = d_k, d_v

    def _asked(self, queries, d_outs, slot, g, tokens):
        """The query and the output gradient of head g of the group, float32."""
        place = (*slot, columns_of(g, self.size), tokens)
        return queries[place].astype(F32), d_outs[place].astype(F32)

    def _weighed(self, q, d_out, k, v, log, product):
        """The weight of a key, and the gradient of its logit."""
        weight = jnp.exp2(dot(q, k) * (self.scale * LOG2_E) - log)
        return weight, weight * (dot(d_out, v) - product)

    def queries_look_down(self, tokens: Any, wanted: Any) -> None:
        """This depth's queries, over the keys of `wanted` slots below."""
        refs, heads = self.refs, range(self.group)
        asked = [self._asked(refs.query_slot, refs.d_out_slot, (), g, tokens) for g in heads]
        totals = [refs.sum_q[g, :, tokens] for g in heads]
        for i in wanted:
            k, v = (turned(ref, i, tokens).astype(F32) for ref in (refs.keys, refs.values))
            for g in heads:
                log, product = (refs.statistics_slot[n : n + 1, tokens] for n in (2 * g, 2 * g + 1))
                totals[g] += self._weighed(*asked[g], k, v, log, product)[1] * k
        for g in heads:
            refs.sum_q[g, :, tokens] = totals[g]

    def keys_are_seen(self, tokens: Any, wanted: Any) -> None:
        """This depth's keys, by the queries of `wanted` slots above."""
        refs = self.refs
        k, v = refs.own_k[:, tokens].astype(F32), refs.own_v[:, tokens].astype(F32)
        d_k, d_v = refs.sum_k[:, tokens], refs.sum_v[:, tokens]
        for i in wanted:
            for g in range(self.group):
                q, d_out = self._asked(refs.queries, refs.d_outs, (i,), g, tokens)
                log, product = (refs.statistics[i, n : n + 1, tokens] for n in (2 * g, 2 * g + 1))
                weight, d_logit = self._weighed(q, d_out, k, v, log, product)
                d_k, d_v = d_k + d_logit * q, d_v + weight * d_out
        refs.sum_k[:, tokens], refs.sum_v[:, tokens] = d_k, d_v

    def finish(self) -> None:
        """The gradients, from the sums."""
        for_tokens(self.blocks, self._gradients)

    def _gradients(self, tokens):
        refs = self.refs
        for g in range(self.group):
            d_q = refs.sum_q[g, :, tokens] * self.scale
            refs.d_q[tokens, columns_of(g, self.size)] = jnp.transpose(d_q.astype(refs.d_q.dtype))
        refs.d_k[tokens, :] = jnp.transpose((refs.sum_k[:, tokens] * self.scale).astype(refs.d_k.dtype))
        refs.d_v[tokens, :] = jnp.transpose(refs.sum_v[:, tokens].astype(refs.d_v.dtype))
