"""What decodes after a recurrence: a layer between its last depth and the head, which isn't part of it."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.operations import REFERENCE, Operations
from dreamer_jax.blocks.parameters import normal
from dreamer_jax.blocks.residual import Residual


class DecodingLayer(nn.Module):
    """x + f(N(x)), f a SwiGLU network.

    Of Dreamer's experts the last depth owns the most that serve a single depth; hence "one may model this behavior via
    a decoding layer" (Knupp et al., section 4.2). What it is made of the paper leaves open.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        size: N, neurons of f.
        std, out_std: of the initial matrices.
    """

    operations: Operations
    hidden_size: int
    size: int
    std: float
    out_std: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream after any depth, [B, P, h] -> [B, P, h]."""
        return x + self._network(name="feed_forward")(RMSNorm(name="norm")(x))

    @nn.nowrap
    def draw(self, key: jax.Array) -> Any:
        """Its parameters, in boxes."""
        return self.clone(operations=REFERENCE, parent=None).init(key, jnp.zeros((1, 1, self.hidden_size)))["params"]

    @nn.nowrap
    def shares(self, part: str, further_norms: int = 0) -> list[Share]:
        """What it counts, applied once.

        Args:
            part: see `Share`.
            further_norms: over h, which it is followed by.
        """
        norms = 1 + further_norms
        return [
            Share(part, self._network(parent=None), 1, 1, experts=True, outside=True),
            Share(part, RMSNorm(self.hidden_size, parent=None), norms, norms, outside=True),
            Share(part, Residual(self.hidden_size, 1, norms), 0, 1, outside=True),
        ]

    @nn.nowrap
    def _network(self, **place: Any) -> FeedForward:
        draws = normal(self.std), normal(self.std), normal(self.out_std)
        return FeedForward(self.operations, self.hidden_size, self.size, *draws, **place)
