"""Where the expert matrices' gradients gather during the backward pass of the depth scan.

Differentiating a scan writes a gradient as large as all experts at every depth and adds it to the sum of the others:
more traffic than the forward pass. Here the sums are float32 totals that the weight-gradient kernel adds to in place,
either at every depth, or, with rows kept aside, once for several depths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import target
from pallas_kernels.dispatch.accumulate import accumulate, visits_of
from pallas_kernels.dispatch.aside import AsideTape
from pallas_kernels.expert_mlp.shapes import Tiles
from pallas_kernels.tiles import Generation


class Rows(NamedTuple):
    """The factors of the weight gradient of up to n depths, one after another, in room for R rows.

    Attributes:
        factors: [3, R, F], compute dtype, see `tpu.input_gradient`.
        x, d_out: [R, h], compute dtype.
        num_blocks: [n, E] float32 (whole numbers), blocks of each expert at each depth; zero where there is none yet.
        depth: scalar float32, how many depths are filled.
    """

    factors: jax.Array
    x: jax.Array
    d_out: jax.Array
    num_blocks: jax.Array
    depth: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertTape(AsideTape):
    """Totals of the gradients, and the rows still to be added; all leaves float, so that a tape can be a gradient.

    Attributes:
        gate_up: [E, 2F, h] float32.
        down: [E, F, h] float32.
        rows: None where every depth is added at once.
        block, columns: tiles of the weight-gradient kernel, see `shapes.Tiles`; static.
        most: blocks that a depth may need; static.
    """

    gate_up: jax.Array
    down: jax.Array
    rows: Rows | None
    block: int = field(metadata={"static": True})
    columns: int = field(metadata={"static": True})
    most: int = field(metadata={"static": True})

    @classmethod
    def of_totals(cls, gate_up: tuple[int, ...]) -> ExpertTape:
        """Of zeros, for matrices [E, 2F, h], where every depth is added at once."""
        experts, doubled, hidden = gate_up
        totals = jnp.zeros(gate_up, jnp.float32), jnp.zeros((experts, doubled // 2, hidden), jnp.float32)
        return cls(*totals, None, 0, 0, 0)

    @classmethod
    def empty(
        cls, gate_up: tuple[int, ...], tiles: Tiles, depths: int, most: int, blocks: int, dtype: jnp.dtype
    ) -> ExpertTape:
        """A tape of zeros for matrices [E, 2F, h], with room for `blocks` blocks, and `most` of them a depth."""
        experts, doubled, hidden = gate_up
        size = doubled // 2
        totals = jnp.zeros(gate_up, jnp.float32), jnp.zeros((experts, size, hidden), jnp.float32)
        kept = None
        if depths > 1:
            rows = blocks * tiles.block
            kept = Rows(
                jnp.zeros((3, rows, size), dtype),
                jnp.zeros((rows, hidden), dtype),
                jnp.zeros((rows, hidden), dtype),
                jnp.zeros((depths, experts), jnp.float32),
                jnp.float32(0),
            )
        return cls(*totals, kept, tiles.block, tiles.columns, most)

    def add(
        self, factors: jax.Array, x: jax.Array, d_out: jax.Array, num_blocks: jax.Array, target: Generation
    ) -> ExpertTape:
        """The totals with the gradient of n depths added: num_blocks [n, E] int32, the rest as of `Rows`."""
        experts, size, hidden = self.down.shape
        totals = self.gate_up.reshape(experts, 2, size, hidden), self.down[:, None]
        visits = visits_of(num_blocks, x.shape[0] // self.block)
        totals = accumulate(totals, factors, (x, d_out), visits, block=self.block, tile=self.columns, target=target)
        return replace(self, gate_up=totals[0].reshape(self.gate_up.shape), down=totals[1][:, 0])

    def keep(self, factors: jax.Array, x: jax.Array, d_out: jax.Array, num_blocks: jax.Array) -> ExpertTape:
        """The tape with one more depth kept aside: the new `Rows` arrays, and the blocks of each expert [E] there."""
        return replace(self, rows=Rows(factors, x, d_out, *self.counted(num_blocks)))

    def settle(self) -> ExpertTape:
        """The tape with the rows kept aside added to its totals; where every depth is added at once, nothing to do."""
        rows = self.rows
        if rows is None:
            return self
        settled = self.add(rows.factors, rows.x, rows.d_out, rows.num_blocks.astype(jnp.int32), target())
        return replace(settled, rows=self.emptied())

    def gradients(self) -> dict[str, jax.Array]:
        """Of both matrices."""
        return {"gate_up": self.gate_up, "down": self.down}
