"""What entered the recurrence, given to every depth again: a stable step towards it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.parameters import Block

KEPT = (1 / 5) ** 0.5
"""Of the state at the start of training, as published models of the kind have it."""


class DiagonalInjection(Block):
    """x <- exp(-dt exp(A)) x + dt B e, with dt = softplus(rate) and e the normed input, as in Parcae
    (github.com/sandyresearch/parcae): a step of a linear system whose every channel falls, so that what is injected
    never piles up.

    A and the rate are one number a channel, B is a matrix that starts as the identity; weight decay leaves them alone.

    Attributes:
        size: h.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, entered: jax.Array) -> jax.Array:
        """x and what entered the recurrence, [..., h] both -> [..., h]."""
        fall = -math.log(KEPT)
        start = nn.initializers.constant(math.log(math.expm1(fall)))  # softplus of it is the fall; exp(A) is 1
        fallen = self.weight("fall", nn.initializers.zeros, (self.size,), ("norm",), "gate")
        dt = jax.nn.softplus(self.weight("rate", start, (self.size,), ("norm",), "gate"))

        def identity(key: jax.Array, shape: tuple[int, ...], dtype: object) -> jax.Array:
            return jnp.eye(self.size, dtype=jnp.float32)

        matrix = self.weight("matrix", identity, (self.size, self.size), ("entered", "hidden"), "injection")
        new = RMSNorm(name="norm")(entered) @ matrix.astype(x.dtype)
        return (jnp.exp(-dt * jnp.exp(fallen)) * x + dt * new).astype(x.dtype)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """B, A, the rate, and the norm's scale."""
        return self.size**2 + 3 * self.size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """B e."""
        return 2 * self.size**2

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """The norm, two products and a sum."""
        return 4 * self.size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The normed input, its product, and the stream."""
        return 3 * self.size

    @nn.nowrap
    def kept_elements(self) -> int:
        """The stream as it was before."""
        return self.size

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """The product forward, again and twice backward."""
        product = 2 * on.tokens * self.size * tiled(self.size)
        moved = 4 * on.tokens * self.size * BFLOAT16_BYTES
        yield Operation("injection", product * (3 + on.again.products), moved * (3 + on.again.products))
