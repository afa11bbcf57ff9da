"""What answers a row's question: the states of one or two positions, and a classifier on them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.parameters import Block, uniform
from dreamer_jax.config.values import Readout

READ: dict[Readout, int] = {"pair": 2, "pair_linear": 2, "cls": 1}
"""R: positions that are read."""


def read_states(x: jax.Array, read: jax.Array | None, count: int) -> jax.Array:
    """The states of R positions side by side: [B, S, h], [B, R] int32 -> [B, R h].

    Without `read`, where only shapes matter, the first R positions.
    """
    if read is None:
        read = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (x.shape[0], count))
    return jnp.take_along_axis(x, read[:, :, None], axis=1).reshape(x.shape[0], -1)


class Classifier(Block):
    """Logits of the classes from the states that are read: linear, or for "pair" W_2 relu(W_1 z + b_1) + b_2.

    Attributes:
        hidden_size: h.
        classes: C.
        readout: see `READ`.
        losses: depths whose states the loss of training reads; elsewhere it is one.
    """

    hidden_size: int
    classes: int
    readout: Readout
    losses: int = 1

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        """[..., R h] -> [..., C] float32."""
        z, zeros = z.astype(jnp.float32), nn.initializers.zeros
        if self.readout == "pair":
            shape = (2 * self.hidden_size, self.hidden_size)
            matrix = self.weight("hidden", uniform(shape[0] ** -0.5), shape, ("both", "hidden"))
            z = jax.nn.relu(
                z @ matrix.astype(z.dtype) + self.weight("hidden_bias", zeros, shape[1:], ("norm",), "bias")
            )
        shape = (z.shape[-1], self.classes)
        matrix = self.weight("out", uniform(shape[0] ** -0.5), shape, ("both", "classes"))
        return z @ matrix.astype(z.dtype) + self.weight("out_bias", zeros, (self.classes,), ("norm",), "bias")

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """pair: 2 h^2 + h, and h C + C; the others: R h C + C."""
        return self._products + self.classes + (self.hidden_size if self.readout == "pair" else 0)

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Once a row, so that a token has its share: a row's tokens see all of it, so their reach is its length."""
        return 2 * self._products / reach.context

    @nn.nowrap
    def loss_flops(self, reach: Reach) -> float:
        """As much again for each depth beyond the first."""
        return (self.losses - 1) * self.matmul_flops(reach)

    @nn.nowrap
    def logit_elements(self, tokens: int) -> int:
        """At most one answer a token."""
        return tokens * self.losses * self.classes

    @property
    def _products(self) -> int:
        if self.readout == "pair":
            return 2 * self.hidden_size**2 + self.hidden_size * self.classes
        return READ[self.readout] * self.hidden_size * self.classes
