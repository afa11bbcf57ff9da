"""Sines and cosines of the position and of the step, added to the state at every depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Counted, OnChip, Operation, Reach
from dreamer_jax.blocks.positions import Depth


def sinusoid(number: jax.Array, size: int) -> jax.Array:
    """[...] -> [..., size] float32: sin(n / 10000^(2j/size)) at 2j, the cosine at 2j + 1 (Vaswani et al., 2017)."""
    frequency = 10_000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle = jnp.asarray(number, jnp.float32)[..., None] * frequency
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*angle.shape[:-1], size)


@dataclass(frozen=True)
class Signals(Counted):
    """x + sinusoid(position) + sinusoid(step), both counted from 1 (Dehghani et al., 2018, Eq. 6 and 7).

    Attributes:
        size: h, even.
    """

    size: int

    def __call__(self, x: jax.Array, positions: jax.Array, depth: Depth) -> jax.Array:
        """[B, P, h] at positions [B, P] -> [B, P, h] in its dtype."""
        signal = sinusoid(positions + 1, self.size) + sinusoid(depth.index + 1, self.size)
        return (x + signal).astype(x.dtype)

    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """The position's signal, and two sums; the step's is one for all tokens."""
        return 3 * self.size

    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Nothing of its own: it is part of the loops over the residual stream."""
        return iter(())


@dataclass(frozen=True)
class DepthEmbedding(Counted):
    """A learned vector that is added at a depth, for counting.

    Attributes:
        size: h.
    """

    size: int

    def parameters(self, folded: bool = False) -> int:
        """The vector."""
        return self.size

    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """One sum."""
        return self.size

    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Nothing of its own: it is part of the loops over the residual stream."""
        return iter(())
