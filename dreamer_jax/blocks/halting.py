"""Adaptive computation time: how many steps a position takes, and what of them is its output (Graves, 2016)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.parameters import Block


class HaltingUnit(Block):
    """p = sigmoid(w x + b), the probability that a position halts (Graves, 2016, Eq. 3); float32.

    w starts at zero, so that b alone says how deep training begins.

    Attributes:
        hidden_size: h.
        bias: what b starts at.
    """

    hidden_size: int
    bias: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., h] -> [...]."""
        row = self.weight("row", nn.initializers.zeros, (self.hidden_size,), ("norm",), "gate")
        bias = self.weight("bias", nn.initializers.constant(self.bias), (1,), ("norm",), "gate")
        return jax.nn.sigmoid(jnp.einsum("...h,h->...", x.astype(jnp.float32), row, precision="highest") + bias[0])

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """w and b."""
        return self.hidden_size + 1

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """w x."""
        return 2 * self.hidden_size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """The weighted state and its sum with the output; sigmoid and bookkeeping are a few numbers a position."""
        return 2 * self.hidden_size


class Pondered(NamedTuple):
    """Where positions are on their way to halting; float32 but for N.

    Attributes:
        output: [B, P, h], y, what the steps so far have put out.
        total: [B, P], H, the halting probabilities added up; exactly 1 once a position has halted, and below before.
        remainder: [B, P], R, what was left to 1 when a position halted; 0 before.
        updates: [B, P] int32, N, the steps taken.
    """

    output: jax.Array
    total: jax.Array
    remainder: jax.Array
    updates: jax.Array

    @classmethod
    def none(cls, rows: int, positions: int, size: int) -> Pondered:
        """Before the first step."""
        zeros = jnp.zeros((rows, positions), jnp.float32)
        return cls(jnp.zeros((rows, positions, size), jnp.float32), zeros, zeros, jnp.zeros(zeros.shape, jnp.int32))

    @property
    def running(self) -> jax.Array:
        """[B, P] bool: positions that have not halted."""
        return self.total < 1

    @property
    def cost(self) -> jax.Array:
        """[B, P]: N + R (Graves, 2016, Eq. 11). N is counted and has no gradient; that of R makes p larger."""
        return self.updates + self.remainder


def ponder(
    before: Pondered,
    p: jax.Array,
    result: jax.Array,
    last: jax.Array,
    epsilon: float,
    form: Literal["graves", "interpolate"],
) -> Pondered:
    """One step of every position that hasn't halted.

    A position halts at the first step with H + p > 1 - epsilon (Graves, 2016, Eq. 5). That step has the weight R = 1 -
    H, earlier ones have p (Eq. 6): the weights add up to 1. With the form "graves" the output is the sum of the
    weighted states (Eq. 8), and the last step that there is counts as the one at which a position halts. With the form
    "interpolate", that of tensor2tensor, it is w x' + (1 - w) y, and a position that never halts has no remainder.

    Args:
        before: after the steps so far.
        p: [B, P], the halting probabilities.
        result: [B, P, h], the states x' that this step has come to.
        last: bool, [] or [B, P], whether no further step is allowed.
        epsilon: see above.
        form: see above.
    """
    halts = before.running & (before.total + p > 1 - epsilon)
    if form == "graves":
        halts |= before.running & last
    left = 1 - before.total
    weight = jnp.where(halts, left, jnp.where(before.running, p, 0))
    shown = weight[..., None]
    kept = before.output if form == "graves" else (1 - shown) * before.output
    return Pondered(
        kept + shown * result.astype(jnp.float32),
        jnp.where(halts, 1, before.total + weight),
        jnp.where(halts, left, before.remainder),
        before.updates + before.running,
    )
