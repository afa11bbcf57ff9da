"""Dense feed-forward networks of a layer: SwiGLU (Shazeer, 2020), and two matrices with or without biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.low_rank import LowRank, linear
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, Initializer, uniform
from pallas_kernels.kept import keep
from pallas_kernels.weights import Stacked


class FeedForward(Block):
    """W_out (silu(W_gate x) * W_up x), with matrices [F, h].

    On a mesh F is divided like experts: its rows are experts of one neuron, of which every token selects all. Only
    where the matrices are changed by a rank, or are stacked ones in decoding, F has to be whole.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        size: F.
        gate, up, out: draw the matrices.
        rank: of the `LowRank` that every matrix has beside it, which counts itself; 0 for none.
    """

    operations: Operations
    hidden_size: int
    size: int
    gate: Initializer
    up: Initializer
    out: Initializer
    rank: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, P, h] -> [B, P, h]."""

        def matrix(name: str, init: Initializer) -> Any:
            axes = ("mlp" if self.rank else "expert", "hidden")
            return self.weight(name, init, (self.size, self.hidden_size), axes)

        gate, up, out = matrix("gate", self.gate), matrix("up", self.up), matrix("out", self.out)
        if not self.rank and not isinstance(gate, Stacked):
            matrices = (each.astype(x.dtype) for each in (gate, up, out))
            return self.operations.feed_forward(x.reshape(-1, x.shape[-1]), *matrices).reshape(x.shape)

        def changed(name: str, x: jax.Array, product: jax.Array) -> jax.Array:
            low = self.low_ranks.get(name)
            return product if low is None else product + low.copy(name=f"{name}_low")(x)

        gates = keep(changed("gate", x, linear(self.operations, x, gate, rows=True)))
        inner = jax.nn.silu(gates) * keep(changed("up", x, linear(self.operations, x, up, rows=True)))
        return changed("out", inner, linear(self.operations, inner, out))

    @property
    def low_ranks(self) -> dict[str, LowRank]:
        """What changes the matrices, by name, unbound."""
        inward, outward = (self.hidden_size, self.size), (self.size, self.hidden_size)
        sizes = {"gate": inward, "up": inward, "out": outward} if self.rank else {}
        return {name: LowRank(self.operations, *its, self.rank, parent=None) for name, its in sizes.items()}

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
        bias: whether there are b_1 and b_2.
        inward, outward: draw W_1 and W_2; None for uniform up to one over the root of the input's size.
    """

    hidden_size: int
    size: int
    activation: Callable[[jax.Array], jax.Array]
    bias: bool = True
    inward: Initializer | None = None
    outward: Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array, drop: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
        """[..., h] -> [..., h]; `drop` is applied between the matrices."""

        def affine(name: str, draw: Any, x: jax.Array, shape: tuple[int, int], axes: tuple[str, str]) -> jax.Array:
            matrix = self.weight(f"{name}_matrix", draw or uniform(shape[0] ** -0.5), shape, axes)
            out = x @ matrix.astype(x.dtype)
            if self.bias:
                bias = self.weight(f"{name}_bias", nn.initializers.zeros, shape[1:], ("norm",), "bias")
                out = out + bias.astype(x.dtype)
            return out

        h, f = self.hidden_size, self.size
        inner = keep(affine("in", self.inward, x, (h, f), ("hidden", "mlp")))
        return affine("out", self.outward, drop(self.activation(inner)), (f, h), ("mlp", "hidden"))

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Both matrices and biases: 2 h F, and F + h."""
        return 2 * self.hidden_size * self.size + self._biases

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Two products."""
        return 4 * self.hidden_size * self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Biases and the activation."""
        return self.size + self._biases

    @property
    def _biases(self) -> int:
        return self.size + self.hidden_size if self.bias else 0

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The input, and what is between the matrices before and after the activation."""
        return self.hidden_size + 2 * self.size

    @nn.nowrap
    def kept_elements(self) -> int:
        """What is between the matrices."""
        return self.size
