"""EA: sparse attention over MLP experts (section 3.5, Eq. 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import (
    BFLOAT16_BYTES,
    FLOAT32_BYTES,
    LANES,
    Filled,
    OnChip,
    Operation,
    Reach,
    tiled,
)
from dreamer_jax.blocks.expert_subsets import among
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.routing import Router, observe_routing, select, usage
from pallas_kernels.dispatch.aside import blocks_aside
from pallas_kernels.expert_mlp.shapes import Tiles, depths_aside
from pallas_kernels.tape import Tape
from pallas_kernels.weights import OutputRows, Stacked


class Answered(NamedTuple):
    """What expert attention returns.

    Attributes:
        out: [B, P, h].
        counts: [E] int32, how often each expert was selected.
        seen: what was observed for analysis, or None.
    """

    out: jax.Array
    counts: jax.Array
    seen: dict[str, jax.Array] | None


@dataclass(frozen=True)
class Rows:
    """How the expert kernels cut the rows of a chip into blocks.

    Attributes:
        filled: blocks of a product that hold rows.
        pairs: (token, choice) pairs that visit the chip, those of other chips' experts included.
        buffer: rows that there is room for, whatever the router does: all visiting pairs and every last block. Only
            used blocks are read or written.
        passes: times the weight gradient reads the experts' intermediates.
    """

    filled: Filled
    pairs: int
    buffer: int
    passes: int


class ExpertAttention(Block):
    """Every token is answered by the k experts whose keys match its depth-encoded query best.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        expert_size: F.
        router: over the E experts, k of them selected.
        std, out_std: of the initial matrices.
        observe: whether to return what analysis wants to know.
    """

    operations: Operations
    hidden_size: int
    expert_size: int
    router: Router
    std: float
    out_std: float
    observe: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        depth: Depth,
        bias: Any,
        context: Context,
        tape: dict[str, Tape] | None = None,
        asked: jax.Array | None = None,
    ) -> Answered:
        """[B, P, h], normed -> [B, P, h]; arguments as of `SequenceAttention`. `asked` [T] bool: the tokens whose
        selections count, because they take what is answered; None: all."""
        experts, axes = self.router.num_experts, ("expert", "mlp", "hidden")
        shape = (experts, 2 * self.expert_size, self.hidden_size)
        gate_up = self.weight("gate_up", normal(self.std), shape, axes)
        shape = (experts, self.expert_size, self.hidden_size)
        down = self.weight("down", normal(self.out_std), shape, axes)

        flat = x.reshape(-1, self.hidden_size)  # [T, h]
        eligible = among(self.router.subsets, depth)
        logits = self.router(flat, depth.flat(), eligible)
        indices, scores = select(logits, bias, self.router.selected, eligible)
        weights = scores / jnp.sum(scores, axis=-1, keepdims=True)
        if not isinstance(gate_up, (OutputRows, Stacked)):  # folding has cast those
            gate_up, down = gate_up.astype(x.dtype), down.astype(x.dtype)
        out = self.operations.expert_mlp(flat, indices, weights, gate_up, down, tape=(tape or {}).get("experts"))
        seen = observe_routing(logits, scores, context.real) if self.observe else None
        counted = context.real if asked is None else context.real & asked
        return Answered(out.reshape(x.shape), usage(indices, experts, counted), seen)

    @nn.nowrap
    def start_tape(self, weights: dict[str, Any], tokens: int, dtype: str) -> dict[str, Tape]:
        """The empty tape of the experts' matrices, where the operation has one."""
        selection = tokens, self.router.selected
        tape = self.operations.expert_mlp.start_tape(selection, weights["gate_up"].shape, dtype)
        return {} if tape is None else {"experts": tape}

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them."""
        matrices = weights["gate_up"].astype(dtype), weights["down"].astype(dtype)
        gate_up, down = self.operations.expert_mlp.arrange(*matrices)
        return {"gate_up": gate_up, "down": down, "router": self.router.fold(weights["router"], dtype)}

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """The experts; the router counts itself."""
        return self.router.num_experts * self._expert

    @nn.nowrap
    def active_parameters(self, applications: int) -> int:
        """The experts of different depths are taken to be different ones as far as there are enough."""
        return min(self.router.num_experts, self.router.selected * applications) * self._expert

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """k experts."""
        return 2 * self.router.selected * self._expert

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """SiLU and product; weighted sum."""
        k = self.router.selected
        return 2 * k * self.expert_size + (2 * k - 1) * self.hidden_size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Normed input; of each expert its input, three in between, its output."""
        return self.hidden_size + self.router.selected * (2 * self.hidden_size + 3 * self.expert_size)

    @nn.nowrap
    def kept_elements(self) -> int:
        """Gate and up."""
        return self.router.selected * 2 * self.expert_size

    @property
    def _expert(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden_size * self.expert_size

    @nn.nowrap
    def rows(self, on: OnChip) -> Rows:
        """The blocks of one product on a chip."""
        rows, own = on.tokens * self.router.selected, self.own(on)
        pairs = rows * on.group
        sizes = self.expert_size, self.hidden_size, on.dtype
        tiles = Tiles.of(pairs, own, *sizes, on.target)  # type: ignore[arg-type]
        block, passes = (tiles.block, self.hidden_size // tiles.columns) if tiles else (LANES, 1)
        return Rows(Filled.by(rows, self.eligible(on), block), pairs, pairs + own * (block - 1), passes)

    @nn.nowrap
    def own(self, on: OnChip) -> int:
        """Experts of a chip."""
        return -(-self.router.num_experts // on.group)

    @nn.nowrap
    def eligible(self, on: OnChip) -> int:
        """Of those, the ones that a depth may choose among."""
        return -(-self.router.choices // on.group)

    @nn.nowrap
    def depths_aside(self, on: OnChip) -> int:
        """Depths whose rows are kept aside for the weight gradient: as chosen, or the default."""
        if on.depths == 1:
            return 1
        sizes = self.expert_size, self.hidden_size, on.dtype
        chosen = on.gradient_depths or depths_aside(self.rows(on).buffer, *sizes, on.depths, on.target)  # type: ignore
        return chosen

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Rows to the experts and back, and the three products' passes."""
        rows, h, size, own = self.rows(on), self.hidden_size, self.expert_size, self.own(on)
        each = 2 * h * 3 * tiled(size)
        products = rows.filled.computed * each
        weights = self.eligible(on) * self._expert
        used, back = rows.filled.rows * BFLOAT16_BYTES, rows.pairs * BFLOAT16_BYTES
        visiting, again = on.tokens * on.group * h * BFLOAT16_BYTES, on.again.products

        # To the experts, whenever products are computed, and twice for the gradient: fetched in chunks, and those put
        # into their place, where they also are kept aside. libtpu leaves a chunk on the chip, but not on a v5p. Home:
        # read, for every pair that visits, their sums written.
        there, home = (4 if on.target.name == "v5p" else 2) * used * h, back * h + visiting
        yield Operation("experts: rows to experts and back", 0, there * (3 + again) + home * (2 + again))
        forward = (used * h + used * h + weights * BFLOAT16_BYTES) * (1 + again)
        gate_and_up = 0 if on.again.gate else 2 * used * size  # written once, or computed again from the rows
        yield Operation("experts: forward", products * (1 + again), forward + gate_and_up)
        gradients = used * h + (gate_and_up or used * h) + used * (h + 3 * size) + weights * BFLOAT16_BYTES
        yield Operation("experts: input gradients", products * (5 / 3 if on.again.gate else 1), gradients)
        totals = own * self._expert * FLOAT32_BYTES
        if on.depths > 1:  # read and written, by as many depths at once as are kept aside
            totals = own * self._expert * 2 * FLOAT32_BYTES / min(self.depths_aside(on), on.depths)
        read = used * (2 * h + 3 * size * rows.passes)
        yield Operation("experts: weight gradients", rows.filled.summed * each, read + totals)

    @nn.nowrap
    def scratch_bytes(self, on: OnChip) -> float:
        """Room for the rows of the busiest routing, of one depth and of those kept aside; bfloat16."""
        rows, h, size = self.rows(on), self.hidden_size, self.expert_size
        block = rows.filled.block
        room = 2 * rows.buffer
        depths, most = self.depths_aside(on), rows.buffer // block
        aside = 0.0
        if depths > 1:
            blocks = blocks_aside(depths, most, rows.pairs / on.group, self.own(on), block)
            aside = (3 * size + 2 * h) * BFLOAT16_BYTES * blocks * block
        kept = 0.0
        if not on.again.products:  # gate and up of every depth, if at all, less what was counted for balanced experts
            kept = ((0 if on.again.gate else room) - 2 * rows.pairs / on.group) * 2 * size * on.total_depth
            if on.group > 1:  # what came from the group's other chips
                kept += BFLOAT16_BYTES * on.tokens * on.group * h * on.total_depth
        return room * (4 * h + 5 * size) + aside + kept
