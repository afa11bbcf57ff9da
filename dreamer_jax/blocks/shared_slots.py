"""Slots of a recurrent core: which keys a position sees of others that went through fewer recurrences, or more."""

from __future__ import annotations

from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import Context, unseen_is_nothing
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.positions import Depth
from pallas_kernels import pages
from pallas_kernels.sequence_attention.paged import interleaved

Rule = Literal["latest", "full", "always-last"]


class SharedSlots(flax.struct.PyTreeNode):
    """Keys and values of a core of C layers at every recurrence, in rows that grow.

    Layer j at recurrence l is written to number (l C + j) mod N. With N = C L nothing is written over; with N = C R a
    token keeps its last R recurrences ("compress"). What a query at recurrence l sees of a position that went through r
    recurrences only (Geiping et al., 2025, section 6, and the released code):

    - latest: the deepest there is, at most l; with a ring, the deepest number there is of the same layer.
    - full: nothing of positions with r <= l.
    - always-last: like latest, but if any position of the row lacks recurrence l, all are seen as they were last, even
      deeper than l.

    Attributes:
        keys, values: [N, B, S, kv, d], compute dtype; or in pages. Without values, keys have both, `interleaved`.
        reached: [1, B, S] int32, r of every position; rows are second, as in all slots. None with latest, where
            `fill_deeper` copies instead.
        layers: C.
        rule: see above.
        table: which pages a row has, see `pallas_kernels.pages`; None where rows are rows.
    """

    keys: jax.Array
    values: jax.Array | None
    reached: jax.Array | None
    layers: int = flax.struct.field(pytree_node=False)
    rule: Rule = flax.struct.field(pytree_node=False)
    table: jax.Array | None = None

    @classmethod
    def empty(
        cls, layers: int, kept: int, rows: int, capacity: int, kv_heads: int, size: int, dtype: str, rule: Rule
    ) -> SharedSlots:
        """For B rows of at most S positions, of which `kept` recurrences are kept."""
        zeros = jnp.zeros((layers * kept, rows, capacity, kv_heads, size), dtype)
        reached = None if rule == "latest" else jnp.zeros((1, rows, capacity), jnp.int32)
        return cls(zeros, zeros, reached, layers, rule)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, depth: Depth, context: Context, operations: Operations
    ) -> tuple[jax.Array, SharedSlots]:
        """Attention over the own row, [B, P, n, d], after k and v are written; `depth.index` is l C + j."""
        slots = self.written(k, v, depth, context.positions)
        seen = slots._numbers(depth.index, context.positions)
        where = slots.keys, slots.values, seen, context.positions, self.table
        return operations.sequence_attention.over_slots(q, *where, kv_heads=k.shape[2]), slots

    def written(self, k: jax.Array, v: jax.Array, depth: Depth, positions: jax.Array) -> SharedSlots:
        """With k and v [B, P, kv, d] of positions [B, P]; `depth.index` is l C + j."""
        place = pages.place(self.table, self.keys, positions)
        k, v = unseen_is_nothing(k, v)
        parts = {"keys": k, "values": v} if self.values is not None else {"keys": interleaved(k, v)}
        if self.keys.ndim == 4:
            parts = {name: pages.flat(part, self.keys.shape[-1]) for name, part in parts.items()}
        new = {
            name: getattr(self, name)
            .at[self._number(depth.index), *place]
            .set(part.astype(self.keys.dtype), mode="drop")
            for name, part in parts.items()
        }
        if self.reached is not None:
            own = jnp.broadcast_to(depth.index // self.layers + 1, positions.shape)
            new["reached"] = self.reached.at[0, *place].set(own, mode="drop")
        return self.replace(**new)

    def _number(self, index: jax.Array) -> jax.Array:
        """Where l C + j is kept; one number for all positions where one recurrence is, which is faster."""
        return (index.reshape(-1)[0] if len(self.keys) == self.layers else index) % len(self.keys)

    def _numbers(self, index: jax.Array, positions: jax.Array) -> jax.Array:
        """Which number every key is taken from, as `over_slots` wants it."""
        if self.reached is None:
            return self._number(index)
        recurrence = (index // self.layers).reshape(*index.shape, *[1] * (3 - index.ndim))  # [1 or B, 1 or P, 1]
        reached = pages.rows_of(self.table, self.reached)[0][:, None]  # [B, 1, S]
        missing = reached <= recurrence  # [B, 1 or P, S]
        if self.rule == "full":
            return jnp.where(missing, -1, recurrence * self.layers + index[..., None] % self.layers)
        inside = jnp.where(positions < reached.shape[-1], positions, -1)  # others leave nothing
        written = jnp.arange(reached.shape[-1]) <= jnp.max(inside, axis=1)[:, None, None]  # [B, 1, S]
        some = jnp.any(missing & written, axis=-1, keepdims=True)
        depths = jnp.where(some, jnp.maximum(reached - 1, 0), recurrence)
        return depths * self.layers + index[..., None] % self.layers

    def fill_deeper(self, depths: jax.Array, positions: jax.Array) -> SharedSlots:
        """After positions [B] have stopped at recurrences [B]: with latest, what they left last stands for the rest."""
        if self.reached is not None:
            return self
        place, numbers = pages.place(self.table, self.keys, positions), jnp.arange(len(self.keys))[:, None]
        source = jnp.minimum(numbers // self.layers, depths) * self.layers + numbers % self.layers  # [N, B]

        def filled(slots: jax.Array) -> jax.Array:
            return slots.at[numbers, *place].set(slots[source, *place], mode="drop")  # one by one, see `Slots`

        return self.replace(keys=filled(self.keys), values=None if self.values is None else filled(self.values))

    def paged(self, table: jax.Array | None) -> SharedSlots:
        """The same memory, whose rows are pages of the rows of a table."""
        return self.replace(table=table)

    def interleaved(self) -> SharedSlots:
        """The same memory with keys and values of a position side by side; but where every key may be of a depth of its
        own, which no kernel takes."""
        if self.values is None or self.reached is not None:
            return self
        return self.replace(keys=interleaved(self.keys, self.values), values=None)

    def flat(self) -> SharedSlots:
        """The same memory with the heads of a position side by side."""
        if self.values is None:
            return self
        return self.replace(keys=pages.flat(self.keys), values=pages.flat(self.values))
