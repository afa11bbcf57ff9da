"""The gradient of depth attention on a TPU, in pull form: what a key gets is summed from what deeper depths left.

Autodiff would push: every depth would read, add to and write the float32 gradient of all shallower slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.layout import F32, Layout, for_rows, for_slots, head_of, row_dot, row_to_column
from pallas_kernels.depth_attention.shapes import Blocks, statistics_lanes
from pallas_kernels.depth_attention.window import WHOLE, Window
from pallas_kernels.tape import Tape


class Queries(flax.struct.PyTreeNode, Tape):
    """What deeper depths have asked of their keys, and what came of it; filled above the present depth.

    With a window, of the R nearest depths only: depth l is in slot l mod R.

    Attributes:
        queries, d_outs: queries and output gradients, [L, T, n d], compute dtype.
        statistics: [kv, T, W] float32; of slot s and head g of a group, in lane 2 (s n/kv + g) the logarithm of the
            softmax's denominator, in the next the product of out and d_out.
    """

    queries: jax.Array
    d_outs: jax.Array
    statistics: jax.Array


def start_tape(cache: DepthCache, heads: int, size: int, window: Window = WHOLE) -> Queries:
    """The empty tape of `pull_gradients` for `heads` query heads of `size`; with a window, of its span's slots."""
    slots, tokens, width = cache.keys.shape
    slots, kv_heads = window.span(slots), width // size
    rows = jnp.zeros((slots, tokens, heads * size), cache.keys.dtype)
    lanes = statistics_lanes(slots, heads // kv_heads)
    return Queries(rows, rows, jnp.zeros((kv_heads, tokens, lanes), F32))


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

    wide, narrow = layout.rows(group * size), layout.rows(size)
    filled, taped = layout.slots_of(size, lower), layout.slots_of(group * size, upper)
    slot, statistics = layout.slot(group * size), layout.statistics(tape.statistics.shape[-1])
    results = pl.pallas_call(
        functools.partial(_pull_kernel, blocks=layout.blocks, size=size, group=group, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=layout.grid(jnp.maximum(1, below + above)),
            in_specs=[wide, narrow, narrow, wide, wide, layout.logs(), filled, filled, taped, taped, statistics],
            out_specs=[wide, narrow, narrow, slot, slot, statistics],
            scratch_shapes=sums(layout),
        ),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (q, k, k, *left)],
        input_output_aliases={9: 3, 10: 4, 11: 5},
        name="depth_attention_backward",
        **layout.compile(),
    )(jnp.stack([depth, below, first_above]).astype(jnp.int32), *rows, logs, *cache, *left)
    return tuple(results[:3]), Queries(*results[3:])


def sums(layout: Layout) -> list[Any]:
    """Scratch of `Pull`."""
    rows = layout.blocks.tokens, layout.size
    return [pltpu.VMEM((layout.group, *rows), F32)] * 3 + [pltpu.VMEM(rows, F32)] * 2


def _pull_kernel(scalars_ref, *refs, blocks, size, group, slots):
    step, depth, below = pl.program_id(2), scalars_ref[0], scalars_ref[1]
    first_above = (scalars_ref[2] + step - below) * blocks.slots
    pull = Pull(PullRefs(*refs), depth, blocks, size, group)
    look = functools.partial(pull.keys_are_seen, lambda i: first_above + i)

    pl.when(step == 0)(pull.start)

    @pl.when(step < below)
    def look_down():
        for_slots(blocks, step * blocks.slots, 0, depth, pull.queries_look_down)

    @pl.when(step >= below)
    def look_up():
        for_slots(blocks, first_above, depth + 1, slots, look)

    pl.when(step == pl.num_programs(2) - 1)(pull.finish)


class PullRefs(NamedTuple):
    """References of the backward kernel: inputs, outputs and scratch, in this order."""

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
    old: Any
    d_q: Any
    d_k: Any
    d_v: Any
    query_slot: Any
    d_out_slot: Any
    new: Any
    own_log: Any
    own_product: Any
    sum_q: Any
    sum_k: Any
    sum_v: Any


class Pull:
    """The steps of the backward kernel on one block of tokens; `slot` is this depth's place on the tape."""

    def __init__(self, refs: PullRefs, slot: jax.Array, blocks: Blocks, size: int, group: int) -> None:
        self.refs, self.slot, self.blocks, self.size, self.group = refs, slot, blocks, size, group
        self.scale = size**-0.5
        self.lane = jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, refs.old.shape[-1]), 1)

    def head(self, ref, place, g):
        """The rows of head g of the group, float32: `place` is a slice of rows, or a slot and a slice."""
        return head_of(ref, place, g, self.size)

    def start(self) -> None:
        """This depth's slots of the tape, and its own key's share of the sums."""
        refs = self.refs
        refs.query_slot[...], refs.d_out_slot[...] = refs.q[...], refs.d_out[...]
        for g in range(self.group):
            refs.own_log[g] = row_to_column(refs.log[g : g + 1, :], refs.own_log.shape[-1])
        for_rows(self.blocks, self._own_key)

    def _own_key(self, rows):
        refs = self.refs
        k, v = refs.k[rows, :].astype(F32), refs.v[rows, :].astype(F32)
        statistics, d_k, d_v = refs.old[rows, :], jnp.zeros_like(k), jnp.zeros_like(v)
        for g in range(self.group):
            q, d_out = self.head(refs.q, rows, g), self.head(refs.d_out, rows, g)
            product = row_dot(d_out, self.head(refs.out, rows, g))
            log = refs.own_log[g, rows, :]
            weight = jnp.exp(row_dot(q * self.scale, k) - log)
            d_logit = weight * (row_dot(d_out, v) - product)
            refs.sum_q[g, rows, :] = d_logit * k
            d_k, d_v = d_k + d_logit * q, d_v + weight * d_out
            refs.own_product[g, rows, :] = jnp.broadcast_to(product, log.shape)
            place = 2 * (self.slot * self.group + g)
            statistics = jnp.where(
                self.lane == place, log[:, :1], jnp.where(self.lane == place + 1, product, statistics)
            )
        refs.new[rows, :], refs.sum_k[rows, :], refs.sum_v[rows, :] = statistics, d_k, d_v

    def queries_look_down(self, rows: Any, wanted: Any) -> None:
        """This depth's queries, over the keys of `wanted` slots below."""
        refs = self.refs
        for g in range(self.group):
            q, d_out = self.head(refs.q, rows, g) * self.scale, self.head(refs.d_out, rows, g)
            log, product, total = refs.own_log[g, rows, :], refs.own_product[g, rows, :], refs.sum_q[g, rows, :]
            for i in wanted:
                k = refs.keys[i, rows, :].astype(F32)
                weight = jnp.exp(row_dot(q, k) - log)
                d_logit = weight * (row_dot(d_out, refs.values[i, rows, :].astype(F32)) - product)
                total += d_logit * k
            refs.sum_q[g, rows, :] = total

    def keys_are_seen(self, slot_of: Callable[[Any], Any], rows: Any, wanted: Any) -> None:
        """This depth's keys, by the queries of `wanted` slots above; `slot_of` tells their places on the tape."""
        refs = self.refs
        k, v = refs.k[rows, :].astype(F32) * self.scale, refs.v[rows, :].astype(F32)
        d_k, d_v, statistics = refs.sum_k[rows, :], refs.sum_v[rows, :], refs.old[rows, :]
        for i in wanted:
            for g in range(self.group):
                q, d_out = self.head(refs.queries, (i, rows), g), self.head(refs.d_outs, (i, rows), g)
                place = 2 * (slot_of(i) * self.group + g)
                weight = jnp.exp(row_dot(q, k, jnp.where(self.lane == place, statistics, 0.0)))
                d_weight = row_dot(d_out, v, jnp.where(self.lane == place + 1, statistics, 0.0))
                d_k, d_v = d_k + weight * d_weight * q, d_v + weight * d_out
        refs.sum_k[rows, :], refs.sum_v[rows, :] = d_k, d_v

    def finish(self) -> None:
        """The gradients, from the sums."""
        refs, size = self.refs, self.size
        for g in range(self.group):
            refs.d_q[:, g * size : (g + 1) * size] = (refs.sum_q[g] * self.scale).astype(refs.d_q.dtype)
        refs.d_k[...] = (refs.sum_k[...] * self.scale).astype(refs.d_k.dtype)
        refs.d_v[...] = refs.sum_v[...].astype(refs.d_v.dtype)
