"""A gate between a step's result and the state before it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.parameters import Block, uniform


class Gate(Block):
    """z = sigmoid([c; x] W + b), and z c + (1 - z) x: the share z of a candidate c in the place of x.

    The bias starts so low that the gate hardly opens: the blend is nearly x itself, and so is its gradient.

    Attributes:
        size: h.
        bias: what b starts at.
    """

    size: int
    bias: float

    @nn.compact
    def __call__(self, candidate: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., h] twice, float32 -> the blend and z, both [..., h] float32."""
        shape, axes = (2 * self.size, self.size), ("both", "hidden")
        matrix = self.weight("matrix", uniform((2 * self.size) ** -0.5), shape, axes, "gate")
        bias = self.weight("bias", nn.initializers.constant(self.bias), (self.size,), ("norm",), "gate")
        z = jax.nn.sigmoid(jnp.concatenate([candidate, x], axis=-1) @ matrix + bias)
        return z * candidate + (1 - z) * x, z

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """2 h^2 + h."""
        return 2 * self.size**2 + self.size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """One product."""
        return 4 * self.size**2

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Bias, sigmoid, two products and their sum."""
        return 5 * self.size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Both inputs, z."""
        return 3 * self.size
