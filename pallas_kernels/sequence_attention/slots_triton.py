"""Attention of one position a row over its slots on an NVIDIA GPU: a Triton kernel (through Pallas), forward only.

A program has the heads that share a key, and walks its share of the slots up to the position, where they lie: rows or
pages. Only long caches are shared among several programs, whose parts are joined afterwards.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu, pages
from pallas_kernels.sequence_attention.slots import LEAST

F32 = jnp.float32
LOG2_E = 1.4426950408889634
SLOTS = 64
"""That a program looks at together."""
ALONE, MOST = 512, 16
"""Slots for each program of a head and row, and how many programs they have at most."""
HEADS = 8
"""That may share a key: each has its own sums."""


def unsupported(q: tuple[int, ...], keys: jax.Array, depths: jax.Array) -> str | None:
    """Why the kernel doesn't take queries [B, P, n, d] of this shape over these keys, or None if it does."""
    _, queries, heads, size = q
    if queries > 1 or depths.ndim > 2:
        return "it has one position a row, at one depth"
    if size & (size - 1) or not 16 <= size <= 256:
        return f"a head size of {size} isn't a power of two from 16 to 256"
    if heads // keys.shape[3] > HEADS:
        return f"more than {HEADS} of {heads} heads share a key"
    if _block(keys.shape[2]) < 16:
        return f"{keys.shape[2]} slots are no multiple of 16"
    return gpu.unsupported(keys.size)


def attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    depths: jax.Array,
    positions: jax.Array,
    table: jax.Array | None = None,
) -> jax.Array:
    """Same contract as `slots.sequence_attention`, for what `unsupported` allows: q [B, 1, n, d]."""
    batch, _, heads, size = q.shape
    kv_heads = keys.shape[3]
    shares = max(1, min(MOST, pages.length(table, keys) // ALONE))
    parts = batch, shares, heads
    whole = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    apart = jax.ShapeDtypeStruct((*parts, size), F32), *[jax.ShapeDtypeStruct(parts, F32)] * 2
    found = pl.pallas_call(
        functools.partial(_kernel, group=heads // kv_heads, paged=table is not None),
        grid=(kv_heads, shares, batch),
        out_shape=whole if shares == 1 else apart,
        name="slots_attention",
        **gpu.compile_for(warps=4, stages=2),
    )(depths.reshape(-1), positions, positions if table is None else table, q, keys, values)
    if shares == 1:
        return found[0]
    summed, largest, total = found
    weights = jnp.exp2(largest - jnp.max(largest, axis=1, keepdims=True))  # [B, shares, n]
    total = jnp.sum(weights * total, axis=1, keepdims=True)
    return (jnp.sum(weights[..., None] * summed, axis=1, keepdims=True) / total[..., None]).astype(q.dtype)


def _kernel(depths_ref, positions_ref, table_ref, q_ref, keys_ref, values_ref, *out_refs, group, paged):
    kv_head, share, row = (pl.program_id(axis) for axis in range(3))
    shares = 1 if len(out_refs) == 1 else out_refs[0].shape[1]
    count, length, _, size = keys_ref.shape[1:]
    capacity = length * table_ref.shape[1] if paged else length
    slots = _block(length)
    depth = depths_ref[row if depths_ref.shape[0] > 1 else 0]
    last = jnp.clip(positions_ref[row, 0], 0, capacity - 1)
    heads = [kv_head * group + own for own in range(group)]
    queries = [q_ref[row, 0, head, :].astype(F32) * (size**-0.5 * LOG2_E) for head in heads]
    used = jax.lax.div(last, slots) + 1  # blocks
    each = jax.lax.div(used + shares - 1, shares)

    def look(block, sums):
        start = block * slots
        page = jnp.minimum(table_ref[row, jax.lax.div(start, length)], count - 1) if paged else row
        within = pl.ds(jax.lax.rem(start, length), slots)
        keys, values = (ref[depth, page, within, kv_head, :].astype(F32) for ref in (keys_ref, values_ref))
        seen = start + jnp.arange(slots, dtype=jnp.int32) <= last
        return tuple(_add(q, keys, values, seen, its) for q, its in zip(queries, sums, strict=True))

    nothing = jnp.full((), LEAST, F32), jnp.zeros((), F32), jnp.zeros(size, F32)
    sums = jax.lax.fori_loop(share * each, jnp.minimum((share + 1) * each, used), look, (nothing,) * group)
    out_ref, *others = out_refs
    for head, (largest, total, summed) in zip(heads, sums, strict=True):
        if not others:
            out_ref[row, 0, head, :] = (summed / total).astype(out_ref.dtype)
            continue
        out_ref[row, share, head, :] = summed
        for ref, number in zip(others, (largest, total), strict=True):
            ref[row, share, head] = number


def _add(q, keys, values, seen, sums):
    """What one head, q [d], makes of some slots [s, d] more: largest logit, sum of weights, weighted sum of values."""
    largest, total, summed = sums
    logits = jnp.where(seen, jnp.sum(keys * q[None], axis=1), LEAST)
    larger = jnp.maximum(largest, jnp.max(logits))
    weights, shrink = jnp.exp2(logits - larger), jnp.exp2(largest - larger)
    return larger, total * shrink + jnp.sum(weights), summed * shrink + jnp.sum(values * weights[:, None], axis=0)


def _block(length: int) -> int:
    """The largest power of two up to SLOTS that divides the slots of a row or page."""
    return min(SLOTS, length & -length)
