"""Depth attention on a TPU: slots past the depth are never fetched, and the new slot is written in place.

Both kernels cut the tokens into blocks, which is what the cores of a megacore share, and walk the slots of a block of
tokens. Blocks of slots that are all wanted take a path without masks; the others go slot by slot, so that nothing is
read that wasn't written. Softmax and sums are float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.depth_attention.cache import DepthCache
from pallas_kernels.depth_attention.shapes import LANES, Blocks, statistics_lanes
from pallas_kernels.tiles import INTERPRETED, generation

F32 = jnp.float32
PARALLEL = ("parallel", "parallel", "arbitrary")


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, write: bool
) -> tuple[jax.Array, jax.Array, DepthCache]:
    """Attention over slots 0 .. depth-1 of the cache, and k and v.

    Args:
        q: [T, n d]; k, v: [T, kv d]; heads side by side.
        cache: [L, T, kv d] each.
        depth: scalar int32.
        write: put k and v into slot `depth`, in place.

    Returns:
        out [T, n d]; the logarithm of the softmax's denominator, float32 [kv, n/kv, T]; the cache.
    """
    tokens = q.shape[0]
    size, group = head_size(k), q.shape[1] // k.shape[1]
    kv_heads = k.shape[1] // size
    target = generation()
    blocks = Blocks.of(cache, target or INTERPRETED)

    def rows(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.tokens, columns), lambda i, h, j, depth: (i, h))

    filled = pl.BlockSpec((blocks.slots, blocks.tokens, size), lambda i, h, j, depth: (j, i, h))
    slot = pl.BlockSpec((None, blocks.tokens, size), lambda i, h, j, depth: (depth[0], i, h))
    logs = pl.BlockSpec((None, group, blocks.tokens), lambda i, h, j, depth: (h, 0, i))
    steps = jnp.maximum(1, pl.cdiv(depth, blocks.slots))
    outs = [rows(group * size), logs] + [slot, slot] * write
    out_shapes: list[Any] = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((kv_heads, group, tokens), F32),
    ] + [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cache] * write
    lanes = min(size, LANES)
    running = pltpu.VMEM((group, blocks.tokens, lanes), F32)
    results = pl.pallas_call(
        functools.partial(_attend_kernel, blocks=blocks, size=size, group=group, write=write),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(tokens, blocks.tokens), kv_heads, steps),
            in_specs=[rows(group * size), rows(size), rows(size), filled, filled],
            out_specs=outs,
            scratch_shapes=[running, running, pltpu.VMEM((group, blocks.tokens, size), F32)],
        ),
        out_shape=out_shapes,
        input_output_aliases={4: 2, 5: 3} if write else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=PARALLEL, vmem_limit_bytes=_vmem(target)),
        interpret=target is None,
        name="depth_attention_forward" if write else "depth_attention_recompute",
    )(_scalar(depth), q, k, v, *cache)
    return results[0], results[1], DepthCache(*results[2:]) if write else cache


def _attend_kernel(depth_ref, q_ref, k_ref, v_ref, keys_ref, values_ref, *rest, blocks, size, group, write):
    out_ref, log_ref, *slot_refs, top_ref, total_ref, sum_ref = rest
    step, depth = pl.program_id(2), depth_ref[0]
    scale = size**-0.5

    @pl.when(step == 0)
    def start():
        if write:
            slot_refs[0][...], slot_refs[1][...] = k_ref[...], v_ref[...]

        def body(rows):
            k, v = k_ref[rows, :].astype(F32), v_ref[rows, :].astype(F32)
            for g in range(group):
                logit = _row_dot(_head(q_ref, rows, g, size) * scale, k)
                top_ref[g, rows, :] = jnp.broadcast_to(logit, (blocks.rows, top_ref.shape[-1]))
                total_ref[g, rows, :] = jnp.ones((blocks.rows, total_ref.shape[-1]), F32)
                sum_ref[g, rows, :] = v

        _for_rows(blocks, body)

    def absorb(rows, wanted):
        for g in range(group):
            q = _head(q_ref, rows, g, size) * scale
            logits = [_row_dot(q, keys_ref[i, rows, :].astype(F32)) for i in wanted]
            top = top_ref[g, rows, :]
            new_top = functools.reduce(jnp.maximum, logits, top)
            shrink = jnp.exp(top - new_top)
            total, summed = total_ref[g, rows, :] * shrink, sum_ref[g, rows, :] * shrink
            for i, logit in zip(wanted, logits, strict=True):
                weight = jnp.exp(logit - new_top)
                total, summed = total + weight, summed + weight * values_ref[i, rows, :].astype(F32)
            top_ref[g, rows, :], total_ref[g, rows, :], sum_ref[g, rows, :] = new_top, total, summed

    _for_slots(blocks, step * blocks.slots, 0, depth, absorb)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish():
        for g in range(group):
            out_ref[:, g * size : (g + 1) * size] = (sum_ref[g] / total_ref[g]).astype(out_ref.dtype)
            log_ref[g : g + 1, :] = _column_to_row(top_ref[g] + jnp.log(total_ref[g]))


def pull_gradients(
    rows: tuple[jax.Array, ...],
    logs: jax.Array,
    cache: DepthCache,
    tape: tuple[jax.Array, jax.Array, jax.Array],
    depth: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array, jax.Array]]:
    """The gradient of one depth, in descending order of depths, in pull form.

    What a key gets from deeper queries is summed here from the queries and output gradients those left on the tape,
    rather than added to a gradient of the whole cache at every depth.

    Args:
        rows: q [T, n d], k, v [T, kv d], out, d_out [T, n d] of this depth.
        logs: as `attend` returned them.
        cache: filled below `depth`.
        tape: queries and output gradients, each [L, T, n d], and statistics [kv, T, W] float32 (of slot s and head g
            of a group: in lane 2 (s n/kv + g) the logarithm, in the next the product of out and d_out); filled above
            `depth`.
        depth: scalar int32.

    Returns:
        (d_q [T, n d], d_k, d_v [T, kv d]); the tape with slot `depth` filled, in place.
    """
    q, k = rows[:2]
    slots, tokens, _ = cache.keys.shape
    size, group = head_size(k), q.shape[1] // k.shape[1]
    kv_heads = k.shape[1] // size
    target = generation()
    blocks = Blocks.of(cache, target or INTERPRETED)
    lanes = tape[2].shape[-1]
    below = pl.cdiv(depth, blocks.slots)
    first_above = jax.lax.div(depth + 1, blocks.slots)
    above = jnp.maximum(pl.cdiv(slots, blocks.slots) - first_above, 0)
    scalars = jnp.stack([depth, below, first_above]).astype(jnp.int32)

    def row(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.tokens, columns), lambda i, h, j, s: (i, h))

    def lower(i, h, j, s):
        return jnp.clip(j, 0, jnp.maximum(s[1] - 1, 0)), i, h

    def upper(i, h, j, s):
        last = (slots - 1) // blocks.slots
        return jnp.minimum(s[2] + jnp.maximum(j - s[1], 0), last), i, h

    wide, narrow = row(group * size), row(size)
    filled = pl.BlockSpec((blocks.slots, blocks.tokens, size), lower)
    taped = pl.BlockSpec((blocks.slots, blocks.tokens, group * size), upper)
    slot = pl.BlockSpec((None, blocks.tokens, group * size), lambda i, h, j, s: (s[0], i, h))
    log_spec = pl.BlockSpec((None, group, blocks.tokens), lambda i, h, j, s: (h, 0, i))
    statistics = pl.BlockSpec((None, blocks.tokens, lanes), lambda i, h, j, s: (h, i, 0))
    own = pltpu.VMEM((group, blocks.tokens, min(size, LANES)), F32)
    shapes = [q, k, k, *tape]
    results = pl.pallas_call(
        functools.partial(_pull_kernel, blocks=blocks, size=size, group=group, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(tokens, blocks.tokens), kv_heads, jnp.maximum(1, below + above)),
            in_specs=[wide, narrow, narrow, wide, wide, log_spec, filled, filled, taped, taped, statistics],
            out_specs=[wide, narrow, narrow, slot, slot, statistics],
            scratch_shapes=[own, own, pltpu.VMEM((group, blocks.tokens, size), F32)]
            + [pltpu.VMEM((blocks.tokens, size), F32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in shapes],
        input_output_aliases={9: 3, 10: 4, 11: 5},
        compiler_params=pltpu.CompilerParams(dimension_semantics=PARALLEL, vmem_limit_bytes=_vmem(target)),
        interpret=target is None,
        name="depth_attention_backward",
    )(scalars, *rows, logs, *cache, *tape)
    return tuple(results[:3]), tuple(results[3:])


def _pull_kernel(scalars_ref, *refs, blocks, size, group, slots):
    q_ref, k_ref, v_ref, out_ref, d_out_ref, log_ref, keys_ref, values_ref, queries_ref, d_outs_ref, old_ref = refs[:11]
    d_q_ref, d_k_ref, d_v_ref, query_slot, d_out_slot, new_ref, *scratch = refs[11:]
    own_log, own_product, sum_q, sum_k, sum_v = scratch
    step, depth, below = pl.program_id(2), scalars_ref[0], scalars_ref[1]
    scale = size**-0.5
    lane = jax.lax.broadcasted_iota(jnp.int32, (blocks.rows, old_ref.shape[-1]), 1)

    @pl.when(step == 0)
    def start():
        query_slot[...], d_out_slot[...] = q_ref[...], d_out_ref[...]
        for g in range(group):
            own_log[g] = _row_to_column(log_ref[g : g + 1, :], own_log.shape[-1])

        def body(rows):
            k, v = k_ref[rows, :].astype(F32), v_ref[rows, :].astype(F32)
            statistics, d_k, d_v = old_ref[rows, :], jnp.zeros_like(k), jnp.zeros_like(v)
            for g in range(group):
                q, d_out = _head(q_ref, rows, g, size), _head(d_out_ref, rows, g, size)
                product = _row_dot(d_out, _head(out_ref, rows, g, size))
                log = own_log[g, rows, :]
                weight = jnp.exp(_row_dot(q * scale, k) - log)
                d_logit = weight * (_row_dot(d_out, v) - product)
                sum_q[g, rows, :] = d_logit * k
                d_k, d_v = d_k + d_logit * q, d_v + weight * d_out
                own_product[g, rows, :] = jnp.broadcast_to(product, log.shape)
                place = 2 * (depth * group + g)
                statistics = jnp.where(lane == place, log[:, :1], jnp.where(lane == place + 1, product, statistics))
            new_ref[rows, :], sum_k[rows, :], sum_v[rows, :] = statistics, d_k, d_v

        _for_rows(blocks, body)

    def queries_look_down(rows, wanted):  # this depth's queries, over the keys below
        for g in range(group):
            q, d_out = _head(q_ref, rows, g, size) * scale, _head(d_out_ref, rows, g, size)
            log, product, total = own_log[g, rows, :], own_product[g, rows, :], sum_q[g, rows, :]
            for i in wanted:
                k = keys_ref[i, rows, :].astype(F32)
                weight = jnp.exp(_row_dot(q, k) - log)
                d_logit = weight * (_row_dot(d_out, values_ref[i, rows, :].astype(F32)) - product)
                total += d_logit * k
            sum_q[g, rows, :] = total

    def keys_are_seen(rows, wanted):  # by the queries of the depths above, this depth's keys
        k, v = k_ref[rows, :].astype(F32) * scale, v_ref[rows, :].astype(F32)
        d_k, d_v, statistics = sum_k[rows, :], sum_v[rows, :], old_ref[rows, :]
        for i in wanted:
            for g in range(group):
                q, d_out = _head(queries_ref, (i, rows), g, size), _head(d_outs_ref, (i, rows), g, size)
                place = 2 * ((first + i) * group + g)
                weight = jnp.exp(_row_dot(q, k, jnp.where(lane == place, statistics, 0.0)))
                d_weight = _row_dot(d_out, v, jnp.where(lane == place + 1, statistics, 0.0))
                d_k, d_v = d_k + weight * d_weight * q, d_v + weight * d_out
        sum_k[rows, :], sum_v[rows, :] = d_k, d_v

    @pl.when(step < below)
    def look_down():
        _for_slots(blocks, step * blocks.slots, 0, depth, queries_look_down)

    first = (scalars_ref[2] + step - below) * blocks.slots

    @pl.when(step >= below)
    def look_up():
        _for_slots(blocks, first, depth + 1, slots, keys_are_seen)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish():
        for g in range(group):
            d_q_ref[:, g * size : (g + 1) * size] = (sum_q[g] * scale).astype(d_q_ref.dtype)
        d_k_ref[...] = (sum_k[...] * scale).astype(d_k_ref.dtype)
        d_v_ref[...] = sum_v[...].astype(d_v_ref.dtype)


def head_size(k: jax.Array) -> int:
    """d of keys [T, kv d]: a register's lanes, or less with a single head."""
    return min(LANES, k.shape[1])


def _head(ref, place, head, size):
    """The rows of one head, float32: `place` is a slice of rows, or a slot and a slice."""
    place = place if isinstance(place, tuple) else (place,)
    return ref[(*place, slice(head * size, (head + 1) * size))].astype(F32)


def _row_dot(a, b, minus=None):
    """Inner products of rows, less the sum of a row of `minus`, in one reduction if sizes agree: [rows, 1]."""
    product = a * b
    if minus is None:
        return jnp.sum(product, axis=-1, keepdims=True)
    if minus.shape == product.shape:
        return jnp.sum(product - minus, axis=-1, keepdims=True)
    return jnp.sum(product, axis=-1, keepdims=True) - jnp.sum(minus, axis=-1, keepdims=True)


def _for_rows(blocks, body):
    """body(slice of rows) over a block of tokens, so that running sums stay in registers."""

    def one(n, carry):
        body(pl.ds(pl.multiple_of(n * blocks.rows, blocks.rows), blocks.rows))
        return carry

    jax.lax.fori_loop(0, blocks.tokens // blocks.rows, one, 0)


def _for_slots(blocks, first, low, high, body):
    """body(rows, indices in the block) for the slots first .. first + blocks.slots - 1 that lie in low .. high - 1."""
    whole = (first >= low) & (first + blocks.slots <= high)

    @pl.when(whole)
    def together():
        _for_rows(blocks, lambda rows: body(rows, range(blocks.slots)))

    @pl.when(jnp.logical_not(whole))
    def one_by_one():
        def one(i, carry):
            _for_rows(blocks, lambda rows: body(rows, [i]))
            return carry

        jax.lax.fori_loop(jnp.maximum(low - first, 0), jnp.minimum(high - first, blocks.slots), one, 0)


def _column_to_row(column):
    """[tokens, lanes], equal lanes -> [1, tokens]."""
    pieces = [jnp.transpose(column[n : n + LANES])[:1] for n in range(0, column.shape[0], LANES)]
    return jnp.concatenate(pieces, axis=1)


def _row_to_column(row, lanes):
    """[1, tokens] -> [tokens, lanes], equal lanes."""
    pieces = [row[:, n : n + LANES] for n in range(0, row.shape[1], LANES)]
    return jnp.concatenate([jnp.transpose(jnp.broadcast_to(piece, (lanes, LANES))) for piece in pieces], axis=0)


def _scalar(value):
    return jnp.reshape(value, (1,)).astype(jnp.int32)


def _vmem(target):
    return target.vmem if target else None


def start_tape(cache: DepthCache, heads: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The empty tape of `pull_gradients` for `heads` query heads of `size`."""
    slots, tokens, width = cache.keys.shape
    kv_heads = width // size
    rows = jnp.zeros((slots, tokens, heads * size), cache.keys.dtype)
    lanes = statistics_lanes(slots, heads // kv_heads)
    return rows, rows, jnp.zeros((kv_heads, tokens, lanes), F32)
