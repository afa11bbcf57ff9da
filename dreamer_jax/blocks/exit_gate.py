"""A gate that says with which probability a token stops here."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.parameters import Block, Initializer


class ExitGate(Block):
    """The logit of lambda = sigmoid(w x + b), in float32.

    Attributes:
        size: h.
        draw: draws w; b starts at zero.
    """

    size: int
    draw: Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., h] -> [...] float32."""
        weight = self.weight("weight", self.draw, (self.size,), ("norm",), "gate")
        bias = self.weight("bias", nn.initializers.zeros, (1,), ("norm",), "gate")
        return jnp.sum(x.astype(jnp.float32) * weight, axis=-1) + bias[0]

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """h + 1."""
        return self.size + 1

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Products and their sum, bias and sigmoid: too narrow for a matrix unit."""
        return 2 * self.size + 2

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The logit; its input is the state that the depth hands on."""
        return 1
