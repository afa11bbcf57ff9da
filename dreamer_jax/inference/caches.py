"""What generation keeps: keys and values of the sequence attention for every position, of the depth attention for
the positions in flight only."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Caches(NamedTuple):
    """Keys and values of the sequence attention, depth by depth. A position's slot is the position itself.

    A slot holds nothing of meaning before its position has passed that depth, and is never looked at before: position
    p sees slots 0..p. So rows of different lengths, and positions that are computed again, need no masks.

    Attributes:
        keys, values: [L, B, S, kv, d], compute dtype.
    """

    keys: jax.Array
    values: jax.Array

    @property
    def capacity(self) -> int:
        """S: positions a row can hold."""
        return self.keys.shape[2]


class State(NamedTuple):
    """P positions of each row in flight between two depths.

    Attributes:
        hidden: [B, P, h], the residual stream, compute dtype.
        keys, values: [L, B, P, kv, d], the depth attention's cache of these positions, filled below their depths;
            None without depth attention. The next token starts with a new state, so this doesn't grow with S.
    """

    hidden: jax.Array
    keys: jax.Array | None
    values: jax.Array | None


def write(slots: jax.Array, new: jax.Array, depths: jax.Array, positions: jax.Array) -> jax.Array:
    """Slots [L, B, S, kv, d] with new rows [B, P, kv, d] at these depths ([] or [B, P]) and positions [B, P].

    Positions outside the slots are dropped.
    """
    rows = jnp.arange(slots.shape[1])[:, None]
    return slots.at[depths, rows, positions].set(new.astype(slots.dtype), mode="drop")


def fill_deeper(caches: Caches, depths: jax.Array, positions: jax.Array) -> Caches:
    """Copy keys and values of these depths into all deeper slots of the same position.

    For positions that stop early: later tokens, which may go deeper, then see what was last computed.

    Args:
        caches: to be changed.
        depths: [B], the last depth that was computed.
        positions: [B].
    """
    rows = jnp.arange(positions.shape[0])
    total_depth = caches.keys.shape[0]
    source = jnp.minimum(jnp.arange(total_depth)[:, None], depths)  # [L, B]

    def fill(slots: jax.Array) -> jax.Array:
        own = slots[source, rows, positions]  # [L, B, kv, d]
        return slots.at[:, rows, positions].set(own, mode="drop")

    return Caches(fill(caches.keys), fill(caches.values))
