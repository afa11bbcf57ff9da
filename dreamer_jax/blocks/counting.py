"""How blocks count themselves. Exact numbers by arithmetic on sizes; nothing is allocated or traced.

FLOPs are 2 per multiply-add of a matrix product. Elementwise work is counted apart: one FLOP an element of each
elementwise function (a norm, a rotation, a softmax, a sigmoid, a product, an addition).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pallas_kernels.dispatch.blocks import half_of
from pallas_kernels.tiles import Generation

BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4
"""Bytes of a number in bfloat16 and in float32."""
LANES = 128
"""Rows and columns of a matrix unit's tile (v4 to v5p)."""
FEWEST_ROWS = 48
"""Rows whose product takes as long as bringing the next tile into the matrix unit: fewer take no less. By the experts'
schedules 16 rows take as long as 53 or 54 at peak on v5e and v5p, 74 on v4."""


def tiled(size: int) -> int:
    """A dimension in whole tiles."""
    return -(-size // LANES) * LANES


@dataclass(frozen=True)
class Reach:
    """How much a token sees: the keys that it meets on average.

    Attributes:
        context: over the sequence, its own included.
        depths: over its own depths, the present one included.
        total: L, where `depths` is the average over a pass of so many; 0 where every depth meets `depths` keys.
    """

    context: float
    depths: float
    total: int = 0


@dataclass(frozen=True)
class Passes:
    """How often a train step computes the forward pass of a block beside the first time, for the backward pass.

    Attributes:
        products: projections, attention scores and values, the experts' products: 1 or 0.
        cheap: norms, rotations, routers, gathers of rows: 1 or 0.
    """

    products: int
    cheap: int

    @property
    def gate(self) -> bool:
        """Whether the experts' gate and up are computed again, and nothing else of theirs: in the backward kernel."""
        return bool(self.cheap and not self.products)


AGAIN = {"full": Passes(1, 1), "attention": Passes(0, 1), "none": Passes(0, 0)}
"""Remat policy -> what is computed a second time."""


@dataclass(frozen=True)
class OnChip:
    """What of a train step runs on one chip, as a block has to know it to say what it does there.

    Attributes:
        tokens: T of one microbatch on the chip.
        length: S.
        group: chips that divide the experts among them.
        again: what is computed again for the backward pass.
        target: the chip, as kernels see it.
        dtype: compute dtype, by name.
        depths: applications of the block that share its weights.
        total_depth: L.
        gradient_depths: as configured; see `ExpertMLP`.
    """

    tokens: int
    length: int
    group: int
    again: Passes
    target: Generation
    dtype: str
    depths: int
    total_depth: int
    gradient_depths: int


@dataclass(frozen=True)
class Operation:
    """One operation of a step on one chip: FLOPs of whole matrix tiles, and bytes of HBM."""

    name: str
    flops: float
    bytes: float

    def times(self, count: float) -> Operation:
        """The same operation so many times."""
        return Operation(self.name, self.flops * count, self.bytes * count)


@dataclass(frozen=True)
class Filled:
    """Blocks that hold the rows of experts.

    Attributes:
        block: rows of a block.
        used: blocks that hold rows, on average.
        halves: of those, blocks that products with matrices have one half of, because the other is empty.
    """

    block: int
    used: float
    halves: float

    @classmethod
    def by(cls, rows: float, experts: int, block: int = LANES) -> Filled:
        """An expert's rows fill whole blocks but, on average, half of the last; half of the last ones are filled to no
        more than a half."""
        last = experts / 2
        return cls(block, rows / block + last, 0 if half_of(block) == block else last)

    @property
    def rows(self) -> float:
        """Rows that are read or written: of whole blocks."""
        return self.used * self.block

    @property
    def computed(self) -> float:
        """Rows of products with the experts' matrices."""
        half = max(half_of(self.block), FEWEST_ROWS)
        return (self.used - self.halves) * max(self.block, FEWEST_ROWS) + self.halves * half

    @property
    def summed(self) -> float:
        """Rows that the weight gradients sum over: fewer than a tile has take as long as a whole one."""
        return self.used * max(self.block, LANES)


class Counted:
    """What every block can say of itself, per token and application unless something else is said. Zero by default.

    `folded` means: as inference has it, shared experts added into the routed ones (Eq. 8).
    """

    def parameters(self, folded: bool = False) -> int:
        """Numbers stored."""
        return 0

    def active_parameters(self, applications: int) -> int:
        """Of those, folded, the ones that a token meets in so many applications of the same weights; at most."""
        return self.parameters(folded=True)

    def untrained_elements(self, folded: bool = False) -> int:
        """Numbers stored beside them, float32, which training doesn't change."""
        return 0

    def pass_flops(self) -> float:
        """Of matrix products that a pass makes once for all its tokens, forward."""
        return 0.0

    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Of matrix products, forward."""
        return 0.0

    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Of everything else, forward."""
        return 0.0

    def loss_flops(self, reach: Reach) -> float:
        """Of matrix products, forward, that a loss of several depths takes in training beyond those of one."""
        return 0.0

    def extra_training_flops(self) -> float:
        """Of products that a train step executes beyond 3 times the forward's."""
        return 0.0

    def cache_elements(self) -> int:
        """Numbers kept in generation for every position of a sequence."""
        return 0

    def cache_read(self, reach: Reach) -> float:
        """Of those of all positions, numbers that a depth reads on average."""
        return reach.context * self.cache_elements()

    def flight_elements(self) -> int:
        """Numbers kept in generation for the newest position only, which the next one writes over."""
        return 0

    def flight_read(self, reach: Reach) -> float:
        """Of those of all depths, numbers that a depth reads on average."""
        return reach.depths * self.flight_elements()

    def intermediate_elements(self) -> int:
        """Numbers that the backward pass reads of a forward pass in which nothing is computed again."""
        return 0

    def kept_elements(self) -> int:
        """Of those, the ones that remat "attention" keeps."""
        return 0

    def gradient_cache_elements(self) -> int:
        """Numbers that later depths attend to: kept for the backward pass, and so are their gradients, in float32."""
        return 0

    def gradient_depths(self, depths: int) -> int:
        """Of how many depths at once those gradients are kept, in a pass of so many."""
        return depths

    def score_elements(self, length: int) -> int:
        """Attention scores [.., S] that a form without a kernel writes down, float32."""
        return 0

    def logit_elements(self, tokens: int) -> int:
        """Logits that the loss of so many tokens holds at once."""
        return 0

    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Operations of a train step on one chip: forward, again where the policy says so, and backward.

        By default every product reads its weights and activations from HBM, and writes its results there.
        """
        reach = Reach((on.length + 1) / 2, (on.total_depth + 1) / 2, on.total_depth)
        flops = self.matmul_flops(reach) * on.tokens
        weights, moved = self.parameters(), 2 * self.intermediate_elements() * on.tokens * BFLOAT16_BYTES
        if not (flops or weights or moved):
            return
        passes = 3 + on.again.products
        totals = weights * FLOAT32_BYTES * (2 if on.depths > 1 else 1)
        name = type(self).__name__.lower()
        yield Operation(name, flops * passes, (moved + weights * BFLOAT16_BYTES) * passes + totals)

    def scratch_bytes(self, on: OnChip) -> float:
        """What the forward and backward pass of one application need beside `intermediate_elements`."""
        return 0.0


@dataclass(frozen=True)
class Share:
    """A block's share of a model.

    Attributes:
        part: of the model that it is counted under, such as "SA".
        block: the block, or anything else that is `Counted`.
        copies: sets of its parameters that are stored; 1 if all depths share them.
        depths: applications of it to every token.
        experts: whether its parameters are experts, which expert parallelism divides.
        outside: whether it stands before or after the recurrence.
        truncated: of its applications, how many are differentiated, the last ones; None for all.
        cached: of its applications, how many keep keys in generation; None for all.
        every: it is applied at depth 0 and every so many-th from there.
        skips: but not at so many of those, the first ones.
    """

    part: str
    block: Any
    copies: int
    depths: int
    experts: bool = False
    outside: bool = False
    truncated: int | None = None
    cached: int | None = None
    every: int = 1
    skips: int = 0

    def acting(self, depths: int) -> int:
        """Of so many depths from 0, at how many it is applied."""
        return max(0, -(-depths // self.every) - self.skips)

    @property
    def differentiated(self) -> int:
        """Applications that have a backward pass."""
        return self.depths if self.truncated is None else min(self.truncated, self.depths)
