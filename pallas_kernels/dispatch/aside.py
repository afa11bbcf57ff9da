"""Rows that a tape keeps aside: the factors of a weight gradient of several depths, one depth after another.

A depth may need room for any routing, several times what it takes when experts are balanced. So the rows of a depth
begin where those of the depth before end, and there is room for the worst of them once: when a depth might not fit,
what is there is added to the totals first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tape import Tape

SLACK = 17 / 16
"""Rows of a depth that there is room for, over those of balanced experts."""


def blocks_aside(depths: int, most: int, pairs: float, experts: int, block: int) -> int:
    """Blocks that hold the rows of so many depths if experts are about balanced.

    Args:
        depths: n.
        most: N, blocks that one depth may need.
        pairs: (token, choice) pairs of a depth if experts are balanced.
        experts: E, each of which leaves half a block empty on average.
        block: rows of a block.
    """
    return most + (depths - 1) * min(most, int(SLACK * pairs / block + experts / 2) + 1)


class AsideTape(Tape):
    """A tape with rows aside; a frozen dataclass with at least these attributes.

    Attributes:
        rows: a NamedTuple of the factors, `num_blocks` [n, E] and `depth`, or None where every depth is added at once.
        block: rows of a block; static.
        most: blocks that a depth may need; static.
    """

    rows: Any
    block: int
    most: int

    @property
    def every(self) -> int:
        """Depths that there is room for if experts are balanced."""
        return 1 if self.rows is None else self.rows.num_blocks.shape[0]

    @property
    def first_block(self) -> jax.Array | int:
        """Where the next depth's blocks begin."""
        return 0 if self.rows is None else jnp.sum(self.rows.num_blocks).astype(jnp.int32)

    def make_room(self) -> Any:
        """Settled if the next depth might not fit. A loop of one turn or none: its arrays stay where they are."""
        if self.rows is None:
            return self
        blocks = self.rows[-3].shape[-2] // self.block

        def full(tape: AsideTape) -> jax.Array:
            return (tape.rows.depth >= tape.every) | (tape.first_block + self.most > blocks)

        return jax.lax.while_loop(full, lambda tape: tape.settle(), self)

    def counted(self, num_blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`num_blocks` and `depth` with one more depth, whose experts fill so many blocks [E]."""
        place = self.rows.depth.astype(jnp.int32)
        counts = num_blocks.astype(jnp.float32)
        blocks = jax.lax.dynamic_update_index_in_dim(self.rows.num_blocks, counts, place, 0)
        return blocks, self.rows.depth + 1

    def emptied(self) -> Any:
        """The rows, none of which counts any longer."""
        return self.rows._replace(num_blocks=jnp.zeros_like(self.rows.num_blocks), depth=jnp.float32(0))
