"""Sequence attention of positions in flight over a cache, softmax in float32: Eq. 1, as in training."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import pages

FEW = 4
"""Queries of a row up to which all their heads are taken together."""
SLOTS_AT_ONCE = 128
"""Slots that are read at once from long caches."""
SHORT = 256
"""Slots up to which a cache is read whole."""


def sequence_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    depths: jax.Array,
    positions: jax.Array,
    table: jax.Array | None = None,
    kv_heads: int = 0,
) -> jax.Array:
    """Queries over the slots 0..position of their row, at their depth.

    Of long caches only the blocks up to the last position are read: what a text may grow to costs nothing.

    Args:
        q: [B, P, n, d], position-encoded.
        keys, values: [L, B, S, kv, d], or in pages; or both are `pages.flat`, [L, B, S, W].
        depths: [] or [B, P] int32; or of every key, [B, 1 or P, S], where -1 isn't seen.
        positions: [B, P] int32. What comes of one outside the slots has no meaning.
        table: which pages a row has, see `pallas_kernels.pages`; None where rows are rows.
        kv_heads: of flat keys.

    Returns:
        [B, P, n, d].
    """
    batch, queries, heads, size = q.shape
    slots, is_flat = pages.length(table, keys), keys.ndim == 4
    kv_heads = kv_heads if is_flat else keys.shape[3]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, size) * size**-0.5
    at = positions[..., None]  # [B, P, 1]

    def apart(read: jax.Array) -> jax.Array:
        return pages.heads_of(read, kv_heads, size) if is_flat else read

    if depths.ndim == 3:  # every key is taken from a depth of its own
        places = jnp.broadcast_to(jnp.arange(slots), (batch, 1, slots))
        own = (jnp.maximum(depths, 0), *pages.place(table, keys, places))
        own_keys, own_values = (apart(c[own][:, 0] if depths.shape[1] == 1 else c[own]) for c in (keys, values))
        part = _attend(grouped, own_keys, own_values, (jnp.arange(slots) <= at) & (depths >= 0))
    elif slots <= SHORT or slots % SLOTS_AT_ONCE or (table is not None and SLOTS_AT_ONCE % keys.shape[2]):
        own_keys, own_values = (apart(_read(c, depths, 0, slots, table)) for c in (keys, values))
        part = _attend(grouped, own_keys, own_values, jnp.arange(slots) <= at)
    else:

        def block(n: jax.Array, before: _Part) -> _Part:
            start = n * SLOTS_AT_ONCE
            own_keys, own_values = (apart(_read(c, depths, start, SLOTS_AT_ONCE, table)) for c in (keys, values))
            return _join(before, _attend(grouped, own_keys, own_values, start + jnp.arange(SLOTS_AT_ONCE) <= at))

        rows = (batch, queries, kv_heads, heads // kv_heads)
        nothing = _Part(jnp.full(rows, LEAST, jnp.float32), jnp.zeros(rows), jnp.zeros((*rows, size)))
        used = jnp.max(jnp.where(positions < slots, positions, 0)) // SLOTS_AT_ONCE + 1
        part = jax.lax.fori_loop(0, used, block, nothing)
    return (part.summed / part.total[..., None]).astype(q.dtype).reshape(q.shape)


def _read(
    cache: jax.Array, depths: jax.Array, start: jax.Array | int, count: int, table: jax.Array | None
) -> jax.Array:
    """Slots start .. start + count of every row at depths [], [B, count, kv, d]; or [B, P], with P behind B unless it
    is 1."""
    if depths.ndim:
        own = _read_apart(cache, depths, start, count, table)
        return own[:, 0] if depths.shape[1] == 1 else own
    if table is None:
        shape = (1, cache.shape[1], count, *cache.shape[3:])
        return jax.lax.dynamic_slice(cache, _indices(cache, depths, 0, start), shape)[0]
    return pages.joined(cache[depths, _numbers(cache, start, count, table)], 1)


def _read_apart(
    cache: jax.Array, depths: jax.Array, start: jax.Array | int, count: int, table: jax.Array | None
) -> jax.Array:
    if table is None:
        blocks = cache.reshape(*cache.shape[:2], -1, count, *cache.shape[3:])
        return blocks[depths, jnp.arange(cache.shape[1])[:, None], start // count]  # [B, P, count, ...]
    return pages.joined(cache[depths[..., None], _numbers(cache, start, count, table)[:, None]], 2)


def _indices(cache: jax.Array, *first: jax.Array | int) -> list[jax.Array]:
    """Of one type, as slices want them; of the other axes everything."""
    return [jnp.asarray(index, jnp.int32) for index in (*first, *[0] * (cache.ndim - len(first)))]


def _numbers(cache: jax.Array, start: jax.Array | int, count: int, table: jax.Array) -> jax.Array:
    """Of the pages that these slots are in, [B, M]."""
    size = cache.shape[2]
    return jax.lax.dynamic_slice_in_dim(table, start // size, count // size, axis=1)


LEAST = -1e30
"""Below every logit, and finite: where a block holds nothing that is visible, nothing is what it adds."""


class _Part(NamedTuple):
    """Attention over some slots, before the division: largest logit and sum of weights [B, P, kv, n/kv], and the
    weighted sum of values [B, P, kv, n/kv, d], float32."""

    largest: jax.Array
    total: jax.Array
    summed: jax.Array


def _join(a: _Part, b: _Part) -> _Part:
    largest = jnp.maximum(a.largest, b.largest)
    scale_a, scale_b = jnp.exp(a.largest - largest), jnp.exp(b.largest - largest)
    total = a.total * scale_a + b.total * scale_b
    return _Part(largest, total, a.summed * scale_a[..., None] + b.summed * scale_b[..., None])


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> _Part:
    """Queries [B, P, kv, n/kv, d] over [B, S, kv, d], or over [B, P, S, kv, d] of their own; visible [B, P, S]."""
    together = keys.ndim == 4 and q.shape[1] <= FEW
    own = "p" if keys.ndim == 5 else ""
    if together:
        logits = _logits_together(q, keys)
    else:
        logits = jnp.einsum(f"bpgqd,b{own}sgd->bpgqs", q, keys, preferred_element_type=jnp.float32)
    logits = jnp.where(visible[:, :, None, None], logits, -jnp.inf)
    largest = jnp.maximum(jnp.max(logits, axis=-1), LEAST)
    weights = jnp.exp(logits - largest[..., None])
    cast = weights.astype(values.dtype)
    if together:
        summed = _sum_together(cast, values)
    else:
        summed = jnp.einsum(f"bpgqs,b{own}sgd->bpgqd", cast, values, preferred_element_type=jnp.float32)
    return _Part(largest, jnp.sum(weights, axis=-1), summed)


def _logits_together(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Logits [B, P, kv, n/kv, S] as one product a row over all heads at once.

    Queries are zero outside their own head's part of the key. That is kv times the multiplications, all of them on
    numbers that had to be read anyway, and the cache is read in its own order; products head by head have to
    transpose it first, which takes longer than everything else.
    """
    batch, slots, kv_heads, size = keys.shape
    spread = jnp.einsum("bpgqd,gh->bpgqhd", q, jnp.eye(kv_heads, dtype=q.dtype)).reshape(batch, -1, kv_heads * size)
    flat = keys.reshape(batch, slots, -1)
    logits = jnp.einsum("bqc,bsc->bqs", spread, flat, preferred_element_type=jnp.float32)
    return logits.reshape(*q.shape[:-1], slots)


def _sum_together(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Weights [B, P, kv, n/kv, S] on values [B, S, kv, d] in the same way: all heads, then each takes its own."""
    batch, slots, kv_heads, size = values.shape
    rows, flat = weights.reshape(batch, -1, slots), values.reshape(batch, slots, -1)
    out = jnp.einsum("bqs,bsc->bqc", rows, flat, preferred_element_type=jnp.float32)
    out = out.reshape(*weights.shape[:-1], kv_heads, size)
    return jnp.einsum("bpgqhd,gh->bpgqd", out, jnp.eye(kv_heads, dtype=out.dtype))
