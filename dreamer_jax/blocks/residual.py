"""The residual stream: what scales the branches that are added to it, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import flax.linen as nn
import jax

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, Counted, OnChip, Operation, Reach
from dreamer_jax.blocks.parameters import Block


@dataclass(frozen=True)
class Residual(Counted):
    """Additions to the stream, and what the fused loops between the products of a depth read and write.

    Attributes:
        hidden_size: h.
        additions: to the stream.
        norms: over h, the stream's own included.
        rotated: elements of queries and keys that are rotated.
    """

    hidden_size: int
    additions: int
    norms: int
    rotated: int = 0

    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """One an element."""
        return self.additions * self.hidden_size

    def kept_elements(self) -> int:
        """The stream between the attentions and the experts."""
        return self.hidden_size

    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Norms, one read and one write each, rotations and additions."""
        stream = on.tokens * self.hidden_size * BFLOAT16_BYTES
        forward = stream * (2 * self.norms + 3) + 2 * on.tokens * self.rotated * BFLOAT16_BYTES
        traffic = forward * (1 + on.again.cheap + 2) + 2 * stream
        yield Operation("norms, rotations, residual stream", 0, traffic)


class LayerScale(Block):
    """A learned factor for every channel of a branch (Touvron et al., 2021).

    Attributes:
        size: h.
        start: what the factors start at.
    """

    size: int
    start: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., h] -> [..., h]."""
        return x * self.weight("factor", nn.initializers.constant(self.start), (self.size,), ("norm",), "norm")

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """The factors."""
        return self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """One an element."""
        return self.size

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Nothing of its own: it is part of the loops over the residual stream."""
        return iter(())
