"""Causal self-attention with plain matrices, as layers of dense models have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, LANES, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.low_rank import LowRank, linear
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.norms import EPSILON, RMSNorm
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, Initializer
from dreamer_jax.blocks.positions import Depth, rope
from pallas_kernels.kept import keep
from pallas_kernels.sequence_attention.shapes import block_of, largest_block


class SelfAttention(Block):
    """Grouped-query attention over the sequence, rotary positions in halves or none.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        heads, kv_heads, head_size: n, kv, d.
        rope_base: of the rotation; 0 for none, where positions are in the input.
        projection, out: draw the fused projection to queries, keys and values, and the output's.
        queries: what queries and keys get before the rotation: "plain" nothing, "bias" learned biases, "norm" an
            RMSNorm over all heads together, "head_norm" one over each head.
        epsilon: of the norm.
        rank: of the `LowRank` that every matrix, those of q, k and v apart, has beside it, which counts itself; 0 for
            none.
        rope_scaling: of the rotation's frequencies, see `positions.scaled`; () for none.
    """

    operations: Operations
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    rope_base: float
    projection: Initializer
    out: Initializer
    queries: Literal["plain", "bias", "norm", "head_norm"] = "plain"
    epsilon: float = EPSILON
    rank: int = 0
    rope_scaling: tuple[float, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """[B, P, h] -> [B, P, h], and the memory with these keys and values.

        Args:
            x: normed as the model wants it.
            depth: of the positions.
            memory: of the sequence, such as `Fresh` or `Slots`.
            context: see Context.
        """
        size, queries, keys = self.head_size, self.heads * self.head_size, self.kv_heads * self.head_size
        inward = self.weight("qkv", self.projection, (self.hidden_size, queries + 2 * keys), ("hidden", "heads"))
        outward = self.weight("out", self.out, (queries, self.hidden_size), ("heads", "hidden"))
        qkv, low = linear(self.operations, x, inward), self.low_ranks
        if low:
            changes = [low[name].copy(name=f"{name}_low")(x) for name in ("q", "k", "v")]
            qkv = qkv + jnp.concatenate(changes, axis=-1)
        qkv = keep(qkv)
        q, k, v = qkv[..., :queries], qkv[..., queries : queries + keys], qkv[..., queries + keys :]
        if self.queries == "bias":
            zeros = nn.initializers.zeros
            q = q + self.weight("q_bias", zeros, (queries,), ("norm",), "bias").astype(q.dtype)
            k = k + self.weight("k_bias", zeros, (keys,), ("norm",), "bias").astype(k.dtype)
        elif self.queries == "norm":
            q, k = RMSNorm(epsilon=self.epsilon, name="q_norm")(q), RMSNorm(epsilon=self.epsilon, name="k_norm")(k)
        q, k, v = (each.reshape(*x.shape[:2], -1, size) for each in (q, k, v))  # [B, P, n or kv, d]
        if self.queries == "head_norm":
            q, k = RMSNorm(epsilon=self.epsilon, name="q_norm")(q), RMSNorm(epsilon=self.epsilon, name="k_norm")(k)
        if self.rope_base:
            position = context.positions[:, :, None]
            q, k = (rope(each, position, self.rope_base, self.rope_scaling) for each in (q, k))
        attended, memory = memory.attend(q, k, v, depth, context, self.operations)
        attended = attended.reshape(*x.shape[:2], -1)
        out = linear(self.operations, attended, outward)
        return (out + low["out"].copy(name="out_low")(attended) if low else out), memory

    @property
    def low_ranks(self) -> dict[str, LowRank]:
        """What changes the matrices, by name, unbound."""
        hidden, queries, keys = self.hidden_size, self.heads * self.head_size, self.kv_heads * self.head_size
        sizes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "out": (queries, hidden)}
        made = sizes.items() if self.rank else ()
        return {name: LowRank(self.operations, *its, self.rank, parent=None) for name, its in made}

    @property
    def query_parameters(self) -> int:
        """Biases or scales of queries and keys."""
        return {"plain": 0, "head_norm": 2 * self.head_size}.get(self.queries, self._met)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Both projections; biases or scales of queries and keys."""
        return self._weights + self.query_parameters

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Projections, scores and values."""
        return 2 * (self._weights + 2 * reach.context * self.heads * self.head_size)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Bias or norm, and rotation, of q and k; softmax."""
        return ((self.queries != "plain") + (self.rope_base > 0)) * self._met + reach.context * self.heads

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The input, q/k/v as projected and as they meet, attended heads."""
        changed = 1 if self.queries == "plain" and not self.rope_base else 2
        return self.hidden_size + changed * self._met + (self.kv_heads + self.heads) * self.head_size

    @nn.nowrap
    def kept_elements(self) -> int:
        """q, k and v, and the attended heads."""
        return 2 * self._met

    @nn.nowrap
    def cache_elements(self) -> int:
        """Keys and values."""
        return 2 * self.kv_heads * self.head_size

    @nn.nowrap
    def score_elements(self, length: int) -> int:
        """Of every head over the row; a kernel computes them again and keeps none."""
        kernel = getattr(self.operations.sequence_attention, "implementation", "xla") == "pallas"
        return 0 if kernel else self.heads * length

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections forward, again, and twice backward; and scores."""
        weights, passes = self._weights, 3 + on.again.products
        moved = 2 * (self.hidden_size + self._met) * on.tokens * BFLOAT16_BYTES
        totals = weights * FLOAT32_BYTES * (2 if on.depths > 1 else 1)
        traffic = (moved + weights * BFLOAT16_BYTES) * passes + totals
        yield Operation("attention: projections", 2 * weights * on.tokens * passes, traffic)
        yield scores_cost(self.heads, self.kv_heads, self.head_size, on)

    @property
    def _met(self) -> int:
        """Elements of q and k."""
        return (self.heads + self.kv_heads) * self.head_size

    @property
    def _weights(self) -> int:
        """Elements of both matrices."""
        return 2 * self.hidden_size * self._met


def scores_cost(heads: int, kv_heads: int, size: int, on: OnChip) -> Operation:
    """Scores and values of causal attention over the sequence, by whole blocks of the triangle."""
    width, rotated = heads * tiled(size), (heads + kv_heads) * size
    block = min(largest_block(size, on.dtype, on.target), on.length)
    block = block_of(on.length, block) if on.length % LANES == 0 else block
    context = (on.length + block) / 2
    # Forward: scores and values. Backward: the scores again, and four products.
    flops = 2 * on.tokens * context * width * (2 * (1 + on.again.products) + 5)
    arrays = on.tokens * 2 * rotated * BFLOAT16_BYTES  # q, out; k, v
    queries = heads * size * BFLOAT16_BYTES
    parts = 2 * on.tokens * queries * on.length / block  # gradients of q by block of keys
    return Operation("sequence attention: scores", flops, arrays * (1 + on.again.products + 2) + parts)
