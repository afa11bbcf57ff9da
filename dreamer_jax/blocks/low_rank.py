"""Products with a matrix, also with one of several stacked ones, and the low-rank change of a matrix (LoRA)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, normal
from pallas_kernels.weights import OutputRows, Stacked


def linear(operations: Operations, x: jax.Array, weight: Any, rows: bool = False) -> jax.Array:
    """x W, [..., a] -> [..., b].

    Args:
        operations: what to compute with.
        x: compute dtype.
        weight: W [a, b]; or `Stacked`, in decoding, where every token has a matrix of its own depth.
        rows: whether every output is a row, W^T [b, a].
    """
    if not isinstance(weight, Stacked):
        matrix = weight.astype(x.dtype)
        return jnp.einsum("...a,ba->...b", x, matrix) if rows else x @ matrix
    values = OutputRows(weight.values) if rows else weight.values
    found = operations.expert_linear(x.reshape(-1, x.shape[-1]), weight.row, None, values)
    return found.reshape(*x.shape[:-1], -1)


class LowRank(Block):
    """x A B, which is added to x W: what changes a matrix W into W + A B (Hu et al., 2021, section 4.1, scale 1).

    B starts at zero, so that training starts at W.

    Attributes:
        operations: what to compute with.
        inputs, outputs: a, b.
        rank: r as asked for; a small matrix has at most its own.
    """

    operations: Operations
    inputs: int
    outputs: int
    rank: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., a] -> [..., b]."""
        draw, zeros = normal(self.inputs**-0.5), nn.initializers.zeros
        down = self.weight("down", draw, (self.inputs, self._rank), ("inputs", "rank"))
        up = self.weight("up", zeros, (self._rank, self.outputs), ("rank", "outputs"))
        return linear(self.operations, linear(self.operations, x, down), up)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """A and B."""
        return self._rank * (self.inputs + self.outputs)

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Two products."""
        return 2 * self.parameters()

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """The addition."""
        return self.outputs

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """What is between the two; the input is that of W."""
        return self._rank

    @property
    def _rank(self) -> int:
        return min(self.rank, self.inputs, self.outputs)
