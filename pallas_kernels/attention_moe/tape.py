"""Where the linear experts' gradients gather during the backward pass of the depth scan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention_moe.shapes import Tiles
from pallas_kernels.backend import target
from pallas_kernels.dispatch.accumulate import accumulate, visits_of
from pallas_kernels.dispatch.aside import AsideTape
from pallas_kernels.tiles import Generation


class Rows(NamedTuple):
    """The factors of the weight gradient of up to n depths, one after another, in room for R rows.

    Attributes:
        x: [R, a], compute dtype, times the scores.
        d_out: [R, b'], compute dtype.
        num_blocks: [n, G] float32 (whole numbers), blocks of each expert at each depth; zero where there is none yet.
        depth: scalar float32, how many depths are filled.
    """

    x: jax.Array
    d_out: jax.Array
    num_blocks: jax.Array
    depth: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinearTape(AsideTape):
    """Totals of the gradient of `routed`, and the rows still to be added; their sum over the experts is the gradient
    of `shared`. All leaves float, so that a tape can be a gradient.

    Attributes:
        totals: [G, a, b'] float32.
        rows: None where every depth is added at once.
        block, columns: tiles of the weight-gradient kernel, see `shapes.Tiles`; static.
        most: blocks that a depth may need; static.
    """

    totals: jax.Array
    rows: Rows | None = None
    block: int = field(default=0, metadata={"static": True})
    columns: int = field(default=0, metadata={"static": True})
    most: int = field(default=0, metadata={"static": True})

    @classmethod
    def empty(
        cls, routed: tuple[int, ...], tiles: Tiles, depths: int, most: int, blocks: int, dtype: jnp.dtype
    ) -> LinearTape:
        """A tape of zeros for matrices [G, a, b'], with room for `blocks` blocks, and `most` of them a depth."""
        experts, inward, outward = routed
        kept = None
        if depths > 1:
            rows = blocks * tiles.block
            kept = Rows(
                jnp.zeros((rows, inward), dtype),
                jnp.zeros((rows, outward), dtype),
                jnp.zeros((depths, experts), jnp.float32),
                jnp.float32(0),
            )
        return cls(jnp.zeros(routed, jnp.float32), kept, tiles.block, tiles.columns, most)

    def add(self, x: jax.Array, d_out: jax.Array, num_blocks: jax.Array, target: Generation) -> LinearTape:
        """The totals with the gradient of n depths added: num_blocks [n, G] int32, the rest as of `Rows`."""
        visits = visits_of(num_blocks, x.shape[0] // self.block)
        how = {"block": self.block, "tile": self.columns, "target": target}
        (totals,) = accumulate([self.totals[:, None]], x[None], [d_out], visits, **how)
        return replace(self, totals=totals[:, 0])

    def keep(self, x: jax.Array, d_out: jax.Array, num_blocks: jax.Array) -> LinearTape:
        """The tape with one more depth kept aside: the new `Rows` arrays, and the blocks of each expert [G] there."""
        return replace(self, rows=Rows(x, d_out, *self.counted(num_blocks)))

    def settle(self) -> LinearTape:
        """The tape with the rows kept aside added to its totals; where every depth is added at once, nothing to do."""
        rows = self.rows
        if rows is None:
            return self
        settled = self.add(rows.x, rows.d_out, rows.num_blocks.astype(jnp.int32), target())
        return replace(settled, rows=self.emptied())
