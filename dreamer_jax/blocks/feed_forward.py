"""Dense feed-forward networks of a layer: SwiGLU (Shazeer, 2020), and two matrices with biases."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, Initializer, uniform
from pallas_kernels.kept import keep


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


class MLP(Block):
    """W_2 f(W_1 x + b_1) + b_2.

    Attributes:
        hidden_size: h.
        size: F.
        activation: f.
    """

    hidden_size: int
    size: int
    activation: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, drop: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
        """[..., h] -> [..., h]; `drop` is applied between the matrices."""

        def affine(name: str, x: jax.Array, shape: tuple[int, int], axes: tuple[str, str]) -> jax.Array:
            matrix = self.weight(f"{name}_matrix", uniform(shape[0] ** -0.5), shape, axes)
            bias = self.weight(f"{name}_bias", nn.initializers.zeros, shape[1:], ("norm",), "bias")
            return x @ matrix.astype(x.dtype) + bias.astype(x.dtype)

        inner = keep(affine("in", x, (self.hidden_size, self.size), ("hidden", "mlp")))
        return affine("out", drop(self.activation(inner)), (self.size, self.hidden_size), ("mlp", "hidden"))

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Both matrices and biases: 2 h F + F + h."""
        return 2 * self.hidden_size * self.size + self.size + self.hidden_size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Two products."""
        return 4 * self.hidden_size * self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Biases and the activation."""
        return 2 * self.size + self.hidden_size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The input, and what is between the matrices before and after the activation."""
        return self.hidden_size + 2 * self.size

    @nn.nowrap
    def kept_elements(self) -> int:
        """What is between the matrices."""
        return self.size
