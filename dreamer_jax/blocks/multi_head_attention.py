"""Multi-head attention with biases, as encoders have it (Vaswani et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, OnChip, Operation, Reach
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, uniform
from dreamer_jax.blocks.positions import Depth, rope
from pallas_kernels.kept import keep


class MultiHeadAttention(Block):
    """head_i = softmax(Q_i K_i^T / sqrt(d) + M) V_i, and one matrix on all heads together; every matrix has a bias.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        heads: n; a head has size h/n.
        rope_base: of the rotary positions in halves; 0 for no positions.
    """

    operations: Operations
    hidden_size: int
    heads: int
    rope_base: float

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """[B, S, h] -> [B, S, h], and the memory, which decides who is seen.

        Args:
            x: normed as the model wants it.
            depth: of the positions.
            memory: of the sequence, such as `Bidirectional`.
            context: see Context.
        """
        h, zeros, draw = self.hidden_size, nn.initializers.zeros, uniform(self.hidden_size**-0.5)
        inward = self.weight("qkv", draw, (h, 3 * h), ("hidden", "heads"))
        outward = self.weight("out", draw, (h, h), ("heads", "hidden"))
        inward_bias = self.weight("qkv_bias", zeros, (3 * h,), ("norm",), "bias")
        outward_bias = self.weight("out_bias", zeros, (h,), ("norm",), "bias")
        qkv = keep(x @ inward.astype(x.dtype) + inward_bias.astype(x.dtype))
        q, k, v = (each.reshape(*x.shape[:2], self.heads, -1) for each in jax.numpy.split(qkv, 3, axis=-1))
        if self.rope_base:
            position = context.positions[:, :, None]
            q, k = rope(q, position, self.rope_base), rope(k, position, self.rope_base)
        attended, memory = memory.attend(q, k, v, depth, context, self.operations)
        return attended.reshape(x.shape) @ outward.astype(x.dtype) + outward_bias.astype(x.dtype), memory

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Four matrices and their biases: 4 h^2 + 4 h."""
        return 4 * self.hidden_size**2 + 4 * self.hidden_size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Projections, scores and values."""
        return 2 * (4 * self.hidden_size**2 + 2 * reach.context * self.hidden_size)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Biases, rotation of q and k, softmax."""
        rotated = 2 * self.hidden_size if self.rope_base else 0
        return 4 * self.hidden_size + rotated + reach.context * self.heads

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The input, q/k/v before and after the rotation, attended heads."""
        return (7 if self.rope_base else 5) * self.hidden_size

    @nn.nowrap
    def kept_elements(self) -> int:
        """q, k and v."""
        return 3 * self.hidden_size

    @nn.nowrap
    def score_elements(self, length: int) -> int:
        """Of every head over the row."""
        return self.heads * length

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections and scores forward, again, and twice backward; scores go through HBM."""
        weights, passes = 4 * self.hidden_size**2, 3 + on.again.products
        moved = 10 * self.hidden_size * on.tokens * BFLOAT16_BYTES
        totals = weights * FLOAT32_BYTES * (2 if on.depths > 1 else 1)
        traffic = (moved + weights * BFLOAT16_BYTES) * passes + totals
        yield Operation("attention: projections", 2 * weights * on.tokens * passes, traffic)
        scores = on.tokens * on.length * self.heads * FLOAT32_BYTES
        flops = 4 * on.tokens * on.length * self.hidden_size * passes
        yield Operation("sequence attention: scores", flops, 4 * scores * passes)
