"""Sequence attention (Eq. 1) on an NVIDIA GPU: flash attention in Triton kernels (through Pallas) that know documents.

cuDNN's, as jax's public interface has it, takes packed documents only as a mask of S x S, which is read for every head.
These compare the documents' numbers, and walk no pair of blocks that have no document in common.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.gpu import plgpu
from pallas_kernels.kept import keep

F32 = jnp.float32
LOG2_E = 1.4426950408889634
WIDE, NARROW = 128, 64
"""Tokens of the block that a program has, and of those that it walks."""
NOTHING = -1e30
"""A logit that is not seen. Finite: what a row sums before it sees anything is later multiplied by zero."""


def unsupported(shape: tuple[int, ...], kv_heads: int, dtype: Any) -> str | None:
    """Why the kernels don't take queries [B, S, n, d] of this shape and dtype, or None if they do."""
    _, length, heads, size = shape
    if length % WIDE:
        return f"a sequence of {length} is not a multiple of {WIDE}"
    if size not in (16, 32, 64, 128):
        return f"a head size of {size} isn't a power of two from 16 to 128"
    if heads % kv_heads:
        return f"{kv_heads} key heads don't divide {heads} heads"
    return gpu.unsupported_products(math.prod(shape), dtype=dtype)


@jax.custom_vjp
def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Same contract as `SequenceAttention`, for shapes that `unsupported` allows; k and v of q's dtype."""
    return _attend(q, k, v, segment_ids)[0]


def _forward(q, k, v, segment_ids):
    out, logs = map(keep, _attend(q, k, v, segment_ids))
    return out, (q, k, v, segment_ids, out, logs)


def _backward(residuals, d_out):
    q, k, v, segment_ids, out, logs = residuals
    products = jnp.sum(out.astype(F32) * d_out.astype(F32), axis=-1).swapaxes(1, 2)  # [B, n, S]
    d_q = _query_gradient(q, k, v, d_out, logs, products, segment_ids)
    return d_q, *_key_gradients(q, k, v, d_out, logs, products, segment_ids), None


sequence_attention.defvjp(_forward, _backward)


def _attend(q, k, v, segment_ids):
    """[B, S, n, d], and the logarithms to base 2 of the softmaxes' denominators [B, n, S] float32."""
    batch, length, heads, _ = q.shape
    return pl.pallas_call(
        functools.partial(_forward_kernel, group=heads // k.shape[2]),
        grid=(length // WIDE, heads, batch),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, length), F32)),
        name="sequence_attention_forward",
        **gpu.compile_for(warps=8, stages=2),
    )(*_keys_walked(segment_ids), segment_ids, q, k, v)


def _forward_kernel(first_ref, alike_ref, ids_ref, q_ref, k_ref, v_ref, out_ref, logs_ref, *, group):
    block, head, row = (pl.program_id(axis) for axis in range(3))
    size = q_ref.shape[3]
    rows = pl.ds(block * WIDE, WIDE)
    q, ids = q_ref[row, rows, head, :], ids_ref[row, rows]
    scale = size**-0.5 * LOG2_E

    def look(kind):
        def step(place, sums):
            most, total, out = sums
            columns = pl.ds(place * NARROW, NARROW)
            k, v = (ref[row, columns, head // group, :] for ref in (k_ref, v_ref))
            logits = plgpu.dot(q, k, trans_b=True) * scale
            logits = _where_seen(kind, logits, ids, lambda: ids_ref[row, columns], rows, columns)
            larger = jnp.maximum(most, jnp.max(logits, axis=1))
            weights, shrink = jnp.exp2(logits - larger[:, None]), jnp.exp2(most - larger)
            total = total * shrink + jnp.sum(weights, axis=1)
            return larger, total, out * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v)

        return step

    start = jnp.full(WIDE, NOTHING, F32), jnp.zeros(WIDE, F32), jnp.zeros((WIDE, size), F32)
    most, total, out = _over_keys(first_ref[row, block], alike_ref[row, block], block, look, start)
    out_ref[row, rows, head, :] = (out / total[:, None]).astype(out_ref.dtype)
    logs_ref[row, head, rows] = most + jnp.log2(total)


def _query_gradient(q, k, v, d_out, logs, products, segment_ids):
    batch, length, heads, _ = q.shape
    return pl.pallas_call(
        functools.partial(_query_kernel, group=heads // k.shape[2]),
        grid=(length // WIDE, heads, batch),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="sequence_attention_d_q",
        **gpu.compile_for(warps=8, stages=3),
    )(*_keys_walked(segment_ids), segment_ids, q, k, v, d_out, logs, products)


def _query_kernel(
    first_ref, alike_ref, ids_ref, q_ref, k_ref, v_ref, d_out_ref, logs_ref, products_ref, d_q_ref, *, group
):
    block, head, row = (pl.program_id(axis) for axis in range(3))
    size = q_ref.shape[3]
    rows = pl.ds(block * WIDE, WIDE)
    q, d_out, ids = q_ref[row, rows, head, :], d_out_ref[row, rows, head, :], ids_ref[row, rows]
    log, product = logs_ref[row, head, rows][:, None], products_ref[row, head, rows][:, None]

    def look(kind):
        def step(place, d_q):
            columns = pl.ds(place * NARROW, NARROW)
            k, v = (ref[row, columns, head // group, :] for ref in (k_ref, v_ref))
            logits = plgpu.dot(q, k, trans_b=True) * (size**-0.5 * LOG2_E) - log
            weights = jnp.exp2(_where_seen(kind, logits, ids, lambda: ids_ref[row, columns], rows, columns))
            d_logits = weights * (plgpu.dot(d_out, v, trans_b=True) - product)
            return d_q + plgpu.dot(d_logits.astype(k.dtype), k)

        return step

    d_q = _over_keys(first_ref[row, block], alike_ref[row, block], block, look, jnp.zeros((WIDE, size), F32))
    d_q_ref[row, rows, head, :] = (d_q * size**-0.5).astype(d_q_ref.dtype)


def _key_gradients(q, k, v, d_out, logs, products, segment_ids):
    batch, length, kv_heads, _ = k.shape
    return pl.pallas_call(
        functools.partial(_key_kernel, group=q.shape[2] // kv_heads),
        grid=(length // WIDE, kv_heads, batch),
        out_shape=tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (k, v)),
        name="sequence_attention_d_kv",
        **gpu.compile_for(warps=8, stages=2),
    )(*_queries_walked(segment_ids), segment_ids, q, k, v, d_out, logs, products)


def _key_kernel(end_ref, alike_ref, ids_ref, q_ref, k_ref, v_ref, d_out_ref, *refs, group):
    """Everything turned, [keys, queries], so that weights and gradients of logits are left factors."""
    logs_ref, products_ref, d_k_ref, d_v_ref = refs
    block, kv_head, row = (pl.program_id(axis) for axis in range(3))
    size = q_ref.shape[3]
    columns = pl.ds(block * WIDE, WIDE)
    k, v, ids = k_ref[row, columns, kv_head, :], v_ref[row, columns, kv_head, :], ids_ref[row, columns]

    diagonal, end, alike = block * (WIDE // NARROW), end_ref[row, block], alike_ref[row, block]
    after = diagonal + WIDE // NARROW

    def look(kind, count, place_of):
        """`count` blocks of queries of each of the group's heads; a loop for each head wouldn't fit into registers."""

        def step(number, sums):
            d_k, d_v = sums
            head = kv_head * group + jax.lax.div(number, count)
            rows = pl.ds(place_of(jax.lax.rem(number, count)) * NARROW, NARROW)
            q, d_out = (ref[row, rows, head, :] for ref in (q_ref, d_out_ref))
            log, product = (ref[row, head, rows][None] for ref in (logs_ref, products_ref))
            logits = plgpu.dot(k, q, trans_b=True) * (size**-0.5 * LOG2_E) - log
            logits = _where_seen(kind, logits, ids, lambda: ids_ref[row, rows], rows, columns, turned=True)
            weights = jnp.exp2(logits)
            d_logits = weights * (plgpu.dot(v, d_out, trans_b=True) - product)
            d_v += plgpu.dot(weights.astype(d_out.dtype), d_out)
            return d_k + plgpu.dot(d_logits.astype(q.dtype), q), d_v

        return lambda sums: jax.lax.fori_loop(jnp.int32(0), group * count, step, sums)

    sums = jnp.zeros((WIDE, size), F32), jnp.zeros((WIDE, size), F32)
    sums = look("alike", alike - after, lambda number: after + number)(sums)
    # Those on the diagonal, and those after it that have other documents too.
    rest = lambda number: diagonal + number + jnp.where(number < WIDE // NARROW, 0, alike - after)  # noqa: E731
    sums = look("diagonal", WIDE // NARROW + end - alike, rest)(sums)
    d_k_ref[row, columns, kv_head, :] = (sums[0] * size**-0.5).astype(d_k_ref.dtype)
    d_v_ref[row, columns, kv_head, :] = sums[1].astype(d_v_ref.dtype)


def _over_keys(first, alike, block, look, sums):
    """The narrow blocks of keys from `first` to the end of the wide block of queries, those on the diagonal last."""
    diagonal = block * (WIDE // NARROW)
    sums = jax.lax.fori_loop(first, alike, look("documents"), sums)
    sums = jax.lax.fori_loop(alike, diagonal, look("alike"), sums)
    return jax.lax.fori_loop(diagonal, diagonal + WIDE // NARROW, look("diagonal"), sums)


def _where_seen(kind, logits, ids, others, rows, columns, turned=False):
    """Logits, with NOTHING where a key isn't of the query's document or, on the diagonal, is in its future.

    Args:
        kind: of block: "alike" is of one document and not on the diagonal, "documents" isn't on it, "diagonal" may be.
        logits: [rows, columns], or turned.
        ids: documents of the wide side.
        others: () -> those of the narrow side.
        rows, columns: slices of queries and of keys.
        turned: whether the wide side is that of the keys.
    """
    if kind == "alike":
        return logits
    seen = ids[:, None] == others()[None]
    if kind == "diagonal":
        query, key = (part.start + jnp.arange(part.size, dtype=jnp.int32) for part in (rows, columns))
        seen &= query[None] >= key[:, None] if turned else query[:, None] >= key[None]
    return jnp.where(seen, logits, NOTHING)


def _keys_walked(segment_ids):
    """Of each wide block of queries the first narrow block of keys that it walks, and the first of those that are of
    its one document up to the diagonal: [B, S / WIDE] each."""
    common, alike, place, diagonal = _pairs(segment_ids)
    first = jnp.min(jnp.where(common, place, diagonal), axis=2)
    start = jnp.max(jnp.where(alike | (place >= diagonal), 0, place + 1), axis=2)
    return first, jnp.maximum(first, start)


def _queries_walked(segment_ids):
    """Of each wide block of keys the end of the narrow blocks of queries that it walks, and that of those that, from
    the diagonal on, are of its one document."""
    common, alike, place, diagonal = _pairs(segment_ids)
    after = diagonal + WIDE // NARROW
    end = jnp.max(jnp.where(common, place + 1, after), axis=2)
    stop = jnp.min(jnp.where(alike | (place < after), place.size, place), axis=2)
    return end, jnp.minimum(end, stop)


def _pairs(segment_ids):
    """Pairs of a wide and a narrow block, [B, S / WIDE, S / NARROW]: whether the ranges of their documents' numbers
    meet, and whether all is one document; the narrow blocks' places, and the wide ones' first in those."""
    length = segment_ids.shape[1]
    wide, narrow = (segment_ids.reshape(-1, length // size, size) for size in (WIDE, NARROW))
    (low, high), (least, most) = (
        tuple(jnp.expand_dims(reduce(part, axis=2), axis) for reduce in (jnp.min, jnp.max))
        for part, axis in ((wide, 2), (narrow, 1))
    )
    place = jnp.arange(length // NARROW, dtype=jnp.int32)
    diagonal = jnp.arange(length // WIDE, dtype=jnp.int32)[:, None] * (WIDE // NARROW)
    return (least <= high) & (most >= low), (least == high) & (most == low), place, diagonal
