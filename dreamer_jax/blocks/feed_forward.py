"""The dense feed-forward network of a layer: SwiGLU (Shazeer, 2020)."""

from __future__ import annotations

import flax.linen as nn
import jax

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, Initializer


class FeedForward(Block):
    """W_out (silu(W_gate x) * W_up x), with matrices [F, h].

    On a mesh F is divided like experts: its rows are experts of one neuron, of which every token selects all.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        size: F.
        gate, up, out: draw the matrices.
    """

    operations: Operations
    hidden_size: int
    size: int
    gate: Initializer
    up: Initializer
    out: Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, P, h] -> [B, P, h]."""

        def matrix(name: str, init: Initializer) -> jax.Array:
            return self.weight(name, init, (self.size, self.hidden_size), ("expert", "hidden")).astype(x.dtype)

        matrices = matrix("gate", self.gate), matrix("up", self.up), matrix("out", self.out)
        return self.operations.feed_forward(x.reshape(-1, x.shape[-1]), *matrices).reshape(x.shape)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """The three matrices."""
        return 3 * self.hidden_size * self.size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Three products."""
        return 2 * self.parameters()

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """The activation, and the product with it."""
        return 2 * self.size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The input, both halves, and their product."""
        return self.hidden_size + 3 * self.size

    @nn.nowrap
    def kept_elements(self) -> int:
        """Both halves."""
        return 2 * self.size
