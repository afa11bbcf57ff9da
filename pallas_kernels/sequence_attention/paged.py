"""Attention over pages where they lie, on a TPU: jax's ragged paged attention.

It wants keys and values of a page side by side, [.., 2 kv, d] with head i's key at 2 i and its value at 2 i + 1, and a
list of pages for each sequence. Positions at depths of their own are sequences of one query each, with the pages of
their depth; positions of a row that are at one depth follow each other, and are one sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

LANES = 128
"""Columns of a tile."""
QUERIES, HEADS = 32, 64
"""That the kernel takes at once; of more heads fewer queries."""
SLOTS = 256
"""That it fetches at once, in whole pages."""
NUMBERS = 1 << 17
"""Of pages that a call is given at most: they lie in scalar memory, of which a core has 1 MiB."""


def unsupported(kv_heads: int, size: int, itemsize: int) -> str | None:
    """Why the kernel doesn't take keys of these heads, of so many bytes a number; or None."""
    if size % LANES:
        return f"head size {size} is not a multiple of {LANES}"
    if size > LANES and (kv_heads > 1 or itemsize > 2):
        return f"head size {size} is more than {LANES}, for which it takes a single key head of 16 bits"
    packed, rest = divmod(2 * kv_heads, 4 // itemsize)
    if rest or (packed not in (1, 2, 4) and packed % 8):
        return f"keys and values of {kv_heads} heads don't fill tiles"
    return None


def interleaved(keys: jax.Array, values: jax.Array) -> jax.Array:
    """[..., kv, d] twice -> [..., 2 kv, d]."""
    both = jnp.stack([keys, values], axis=-2)
    return both.reshape(*keys.shape[:-2], 2 * keys.shape[-2], keys.shape[-1])


def apart(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The way back."""
    return both[..., 0::2, :], both[..., 1::2, :]


def attention(q: jax.Array, both: jax.Array, depths: jax.Array, positions: jax.Array, table: jax.Array) -> jax.Array:
    """Queries over the slots 0..position of their row, at their depth.

    Args:
        q: [B, P, n, d], position-encoded.
        both: [L, pages, size, 2 kv, d], `interleaved`.
        depths: [], then positions of a row follow each other; or [B, P] int32.
        positions: [B, P] int32. What comes of one outside the slots has no meaning.
        table: [B, M] int32, see `pallas_kernels.pages`.

    Returns:
        [B, P, n, d].
    """
    batch, queries, heads, size = q.shape
    if q.dtype.itemsize == 4 and heads == both.shape[3] // 2 > 4:
        # It would take four of these heads at once, but wants eight: each is given twice.
        return attention(jnp.repeat(q, 2, axis=2), both, depths, positions, table)[:, :, ::2]
    count, page = both.shape[1:3]
    capacity = table.shape[1] * page
    own = jnp.minimum(table, count - 1)  # pages that aren't there: somewhere, and unseen
    if depths.ndim:
        numbers = (depths[..., None] * count + own[:, None]).reshape(batch * queries, -1)
        lengths = jnp.where(positions < capacity, positions + 1, 1).reshape(-1)
        each = 1
    else:
        # Behind the last page there is padding: queries of a chunk that reaches beyond the row.
        numbers = jnp.pad(depths * count + own, ((0, 0), (0, -(-queries // page))))
        first = positions[:, 0]
        lengths = jnp.where(first < capacity, first + queries, queries)
        each = queries
    flat = both.reshape(-1, *both.shape[2:])
    together = min(heads, 8 * heads // (both.shape[3] // 2))  # heads that the kernel takes at once, at most
    sequences = at_once(*numbers.shape)

    def attend(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, lengths, numbers = part
        return ragged_paged_attention(
            q,
            flat,
            lengths,
            numbers,
            jnp.arange(sequences + 1, dtype=jnp.int32) * each,
            jnp.array([sequences], jnp.int32),
            sm_scale=size**-0.5,
            num_kv_pages_per_block=min(numbers.shape[1], max(1, SLOTS // page)),
            num_queries_per_block=min(max(1, QUERIES // -(-together // HEADS)), len(q)),
        )

    whole = q.reshape(-1, heads, size), lengths.astype(jnp.int32), numbers.astype(jnp.int32)
    if sequences == len(lengths):
        return attend(whole).reshape(q.shape)
    parts = jax.tree.map(lambda its: its.reshape(len(lengths) // sequences, -1, *its.shape[1:]), whole)
    return jax.lax.map(attend, parts).reshape(q.shape)


def at_once(sequences: int, pages: int) -> int:
    """Of so many sequences of so many pages those that a call is given: as many as divide them and have room."""
    most = max(1, NUMBERS // (-(-pages // LANES) * LANES))
    return max(n for n in range(1, min(sequences, most) + 1) if sequences % n == 0)
