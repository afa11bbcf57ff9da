"""What attention looks back at: memories of the sequence, and of a token's own depths.

A step is the same function in training and in decoding; what differs is the memory that it is given. A memory attends:
it takes the queries, keys and values of the positions at hand, keeps what it has to, and returns what the queries see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.positions import Depth
from pallas_kernels import pages
from pallas_kernels.sequence_attention.paged import interleaved

NOWHERE = 1 << 30
"""A position outside of all slots: it is computed, and leaves nothing."""
PRECISION = "jax_default_matmul_precision"
"""jax's setting of how precisely a TPU multiplies float32."""


class Context(NamedTuple):
    """What every depth of a pass sees unchanged; it gets no gradient.

    Attributes:
        segment_ids: [B, P] int32, the document of each position in its row; 0 is padding.
        positions: [B, P] int32, from 0 within the document; in decoding also the slot.
        state: the model's own state, by collection, such as balancing biases.
        keys: [B], one a row, for what a pass draws (a state to start from, dropout); None in evaluation and decoding.
        visible: [B, S, S] bool, whether position i sees position j of its own document, such as a graph's edges; None
            where it sees all that its attention lets it see. Whole rows only, and for `Bidirectional` only.
        read: [B, R] int32, the positions whose states answer a row's question; None where every position has targets.
        key: for what a step of training draws once, the same for all rows; None in evaluation and decoding.
    """

    segment_ids: jax.Array
    positions: jax.Array
    state: Any = None
    keys: jax.Array | None = None
    visible: jax.Array | None = None
    read: jax.Array | None = None
    key: jax.Array | None = None

    @property
    def real(self) -> jax.Array:
        """[T] bool: positions that are not padding."""
        return self.segment_ids.reshape(-1) > 0


class Fresh(NamedTuple):
    """Whole rows at once: keys and values of all positions are at hand, and nothing is kept."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, depth: Depth, context: Context, operations: Operations
    ) -> tuple[jax.Array, Fresh]:
        """Causal attention within each document: q [B, S, n, d], k and v [B, S, kv, d] -> [B, S, n, d]."""
        return operations.sequence_attention(q, k, v, context.segment_ids), self


class Bidirectional(NamedTuple):
    """As `Fresh`, but a position sees earlier and later ones alike: all of its document that is visible."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, depth: Depth, context: Context, operations: Operations
    ) -> tuple[jax.Array, Bidirectional]:
        """Attention within each document: q [B, S, n, d], k and v [B, S, kv, d] -> [B, S, n, d]."""
        return operations.bidirectional_attention(q, k, v, context.segment_ids, context.visible), self


class Slots(NamedTuple):
    """Keys and values of rows that grow, depth by depth. A position's slot is the position itself.

    A slot holds nothing of meaning before its position has passed that depth, and is never looked at before: position
    p sees slots 0..p. So rows of different lengths, and positions that are computed again, need no masks.

    Attributes:
        keys, values: [L, B, S, kv, d], compute dtype; or in pages. Without values, keys have both, `interleaved`; or
            both are `pages.flat`, [L, B, S, W].
        table: which pages a row has, see `pallas_kernels.pages`; None where rows are rows.
    """

    keys: jax.Array
    values: jax.Array | None
    table: jax.Array | None = None

    @classmethod
    def empty(cls, depths: int, rows: int, capacity: int, kv_heads: int, size: int, dtype: str) -> Slots:
        """For L depths of B rows of at most S positions."""
        zeros = jnp.zeros((depths, rows, capacity, kv_heads, size), dtype)
        return cls(zeros, zeros)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, depth: Depth, context: Context, operations: Operations
    ) -> tuple[jax.Array, Slots]:
        """Attention over the own row at the own depth, [B, P, n, d], after k and v are written there.

        Positions outside the slots are computed but leave nothing.
        """
        slots = self.written(k, v, depth, context.positions)
        where = slots.keys, slots.values, depth.index, context.positions, self.table
        return operations.sequence_attention.over_slots(q, *where, kv_heads=k.shape[2]), slots

    def written(self, k: jax.Array, v: jax.Array, depth: Depth, positions: jax.Array) -> Slots:
        """With k and v [B, P, kv, d] at a depth of positions [B, P]."""
        place = (depth.index, *pages.place(self.table, self.keys, positions))
        k, v = unseen_is_nothing(k, v)

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            new = pages.flat(new, kept.shape[-1]) if kept.ndim == 4 else new
            return kept.at[place].set(new.astype(kept.dtype), mode="drop")

        if self.values is None:
            return self._replace(keys=put(self.keys, interleaved(k, v)))
        return self._replace(keys=put(self.keys, k), values=put(self.values, v))

    def fill_deeper(self, depths: jax.Array, positions: jax.Array) -> Slots:
        """Copy what these depths have left into all deeper slots of the same position.

        For positions that stop early: later ones, which may go deeper, then see what was last computed.

        Args:
            depths: [B], the last depth that was computed.
            positions: [B].
        """
        place = pages.place(self.table, self.keys, positions)
        every = jnp.arange(self.keys.shape[0])[:, None]
        source = jnp.minimum(every, depths)  # [L, B]

        def fill(slots: jax.Array) -> jax.Array:
            # One depth at a time, as `written` does: slices of all depths would have a TPU lay the memory out anew.
            return slots.at[every, *place].set(slots[source, *place], mode="drop")

        return self._replace(keys=fill(self.keys), values=None if self.values is None else fill(self.values))

    def paged(self, table: jax.Array | None) -> Slots:
        """The same memory, whose rows are pages of the rows of a table."""
        return self._replace(table=table)

    def interleaved(self) -> Slots:
        """The same memory with keys and values of a position side by side."""
        return self if self.values is None else self._replace(keys=interleaved(self.keys, self.values), values=None)

    def flat(self) -> Slots:
        """The same memory with the heads of a position side by side."""
        if self.values is None:
            return self
        return self._replace(keys=pages.flat(self.keys), values=pages.flat(self.values))


def unseen_is_nothing(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., d] such that what isn't seen adds nothing, also where they aren't finite: a weight of zero
    times such a value would be NaN, for every row that has the slot after this one. Who sees the key gets NaN."""
    broken = ~jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(broken, jnp.nan, k), jnp.where(broken, 0, v)


class Unread(NamedTuple):
    """Slots that are written and not looked at: for positions that stopped, whose keys at deeper depths are known.

    Attributes:
        slots: `Slots`, or others that are written like them.
    """

    slots: Any

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, depth: Depth, context: Context, operations: Operations
    ) -> tuple[jax.Array, Unread]:
        """Writes k and v; what it returns of the shape of q has no meaning."""
        return q, Unread(self.slots.written(k, v, depth, context.positions))


class Memory(NamedTuple):
    """What a pass attends to beside the positions at hand.

    Attributes:
        sequence: of the rows; what a family puts there, such as `Fresh` or `Slots`.
        depths: of the positions at hand, at their own shallower depths, such as a `DepthCache`; None where nothing
            looks back along depth. In decoding it belongs to the positions in flight, and the next ones start anew.
    """

    sequence: Any
    depths: Any = None


def for_kernels(memory: Any, operations: Operations) -> Any:
    """A family's memory of rows that grow as attention over pages wants it where this code is for: keys and values
    side by side, if a kernel reads them; elsewhere on a TPU as `for_rows`."""

    def packed(kept: Any) -> Any:
        if not hasattr(kept, "interleaved"):
            return kept
        its = kept.interleaved()
        if its is not kept and operations.sequence_attention.interleaves(*kept.keys.shape[3:], kept.keys.dtype):
            return its
        return _flat(kept) if operations.sequence_attention.flattens() else kept

    return jax.tree.map(packed, memory, is_leaf=_in_rows)


def for_rows(memory: Any, operations: Operations) -> Any:
    """A family's memory of rows that grow as attention over rows wants it where this code is for: on a TPU with the
    heads of a position side by side, and as precise as products there are."""
    if not operations.sequence_attention.flattens():
        return memory
    return jax.tree.map(lambda kept: _flat(kept) if hasattr(kept, "flat") else kept, memory, is_leaf=_in_rows)


def _flat(kept: Any) -> Any:
    return jax.tree.map(_as_multiplied, kept.flat())


def _as_multiplied(leaf: jax.Array) -> jax.Array:
    """Keys or values as precise as a TPU's products take them: float32 is rounded to bfloat16, unless jax is asked for
    more. Of a memory in float32 libtpu would convert everything at every depth to read some of it."""
    rounded = getattr(jax.config, PRECISION) in (None, "default", "fastest", "bfloat16")
    return leaf.astype(jnp.bfloat16) if rounded and leaf.dtype == jnp.float32 else leaf


def in_pages(memory: Any, table: jax.Array | None) -> Any:
    """A family's memory of rows that grow, whose rows from now on are pages of the rows of a table [B, M]; with None
    they are rows again. It has the same arrays."""
    return jax.tree.map(lambda kept: kept.paged(table), memory, is_leaf=_in_rows)


def pages_of_rows(memory: Any, rows: jax.Array) -> Any:
    """A memory in pages, of which only these rows [b] int32 are left; it has the same arrays."""
    return jax.tree.map(lambda kept: kept.paged(kept.table[rows]), memory, is_leaf=_in_rows)


def pages_like(memory: Any, other: Any) -> Any:
    """A memory in pages, with the rows of another one."""
    return jax.tree.map(lambda kept, like: kept.paged(like.table), memory, other, is_leaf=_in_rows)


def _in_rows(kept: Any) -> bool:
    return hasattr(kept, "paged")
