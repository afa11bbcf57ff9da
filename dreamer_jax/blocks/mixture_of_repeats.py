"""The mixture of repeats: after each repeat a router says which positions go on to the next one.

Mohtashami et al. (2023). In training and where the budget is fixed, the positions with the largest gates go
on, as many as the capacity allows. That looks at the whole document, so it isn't causal: generation goes on with
positions whose gate reaches a threshold instead.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.parameters import Block, Initializer
from pallas_kernels.weights import own

ROUNDING = 1e-4
"""Added before a capacity is cut down to a whole number, so that 0.7 * 10 is 7."""


class RepeatRouter(Block):
    """The logit w x of the gate g = sigmoid(w x), float32, without bias.

    Attributes:
        size: h.
        draw: draws w.
    """

    size: int
    draw: Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, P, h] -> [B, P]."""
        row = own(self.weight("row", self.draw, (self.size,), ("norm",), "gate"))  # [h], or of each token [T, h]
        row = row if row.ndim == 1 else row.reshape(x.shape)
        return jnp.sum(x.astype(jnp.float32) * row, axis=-1)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """w."""
        return self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Products and their sum, too narrow for a matrix unit; the gated sum of two states."""
        return 2 * self.size + 1 + 3 * self.size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The state before the repeat, and the two numbers of a position."""
        return self.size + 2


def drawn_capacities(key: jax.Array, count: int) -> jax.Array:
    """f_1 >= f_2 >= ..., [count] float32: min(1, 1.05 U(0, 1)), sorted, as in the official code."""
    return jnp.sort(jnp.minimum(1, 1.05 * jax.random.uniform(key, (count,))))[::-1]


def share_going_on(capacities: jax.Array, index: jax.Array) -> jax.Array:
    """f_{r+1} / f_r with f_0 = 1, after repeat r = `index` from 0; nothing goes on behind the last."""
    f = jnp.concatenate([jnp.ones(1), capacities, jnp.zeros(1)])
    return f[index + 1] / jnp.maximum(f[index], 1e-6)


def largest(logits: jax.Array, active: jax.Array, segments: jax.Array, share: jax.Array) -> jax.Array:
    """[B, S] bool: of each document's n active positions the floor(share * n) with the largest logits.

    Of equal ones the earlier. Documents are told apart, so that what a row is packed with changes nothing.

    Args:
        logits: [B, S].
        active: [B, S] bool.
        segments: [B, S] int32, the documents.
        share: [].
    """
    place = jnp.arange(logits.shape[1])
    rivals = (segments[:, :, None] == segments[:, None]) & active[:, None]  # [B, i, j]
    mine, other = logits[:, :, None], logits[:, None]
    ahead = (other > mine) | ((other == mine) & (place < place[:, None]))
    rank = jnp.sum(rivals & ahead, axis=-1)
    room = jnp.floor(share * jnp.sum(rivals, axis=-1) + ROUNDING)
    return active & (rank < room)
