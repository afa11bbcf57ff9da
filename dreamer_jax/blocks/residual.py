"""The residual stream, for counting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, Counted, OnChip, Operation, Reach


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
