"""PA: attention of a token over learned keys and values, the same at every depth: a dimension of the mixture beside the
sequence, the depths and the experts (section 5 leaves it open)."""

from __future__ import annotations

from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.parameters import Block, normal
from dreamer_jax.blocks.positions import Depth, DepthCode, tell_depth


class ParameterAttention(Block):
    """softmax(q k / sqrt(d)) v over M learned slots (persistent memory, Sukhbaatar et al., 2019). Queries are told
    their depth as those of routers are, so that other slots may answer at other depths; keys stay as they are.

    Attributes:
        hidden_size: h.
        slots: M.
        heads, head_size: n, d; each head has slots of its own.
        code: how queries are told their depth; None: they aren't.
        std, out_std: of the initial matrices.
        every: it acts at depth 0 and every so many-th from there; the mixture sees to it.
    """

    hidden_size: int
    slots: int
    heads: int
    head_size: int
    code: DepthCode | None
    std: float
    out_std: float
    every: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth) -> jax.Array:
        """[B, P, h], normed -> [B, P, h]."""
        flat, size = x.reshape(-1, x.shape[-1]), self.heads * self.head_size  # [T, h]
        query = self.weight("query", normal(self.std), (self.hidden_size, size), ("hidden", "heads"))
        shape, axes = (self.heads, self.slots, self.head_size), ("norm", "slots", "heads")
        keys = self.weight("keys", normal(self.std), shape, axes)
        values = self.weight("values", normal(self.std), shape, axes)
        out = self.weight("output", normal(self.out_std), (size, self.hidden_size), ("heads", "hidden"))
        q = (flat @ query.astype(x.dtype)).reshape(-1, self.heads, self.head_size)
        (q,) = tell_depth(self, self.code, depth.flat(1), RMSNorm(name="q_norm")(q))
        k = RMSNorm(name="k_norm")(keys.astype(x.dtype))
        logits = jnp.einsum("tnd,nmd->tnm", q, k, preferred_element_type=jnp.float32) * self.head_size**-0.5
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        read = jnp.einsum("tnm,nmd->tnd", weights, values.astype(x.dtype))
        return (read.reshape(-1, size) @ out.astype(x.dtype)).reshape(x.shape)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Both maps, keys and values, two norms, and what is learned of depths."""
        told = self.code.rows if self.code else 0
        maps = 2 * self.hidden_size * self.heads * self.head_size
        return maps + 2 * self.heads * self.slots * self.head_size + (2 + told) * self.head_size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Both maps, and two products with all slots."""
        return 4 * self.heads * self.head_size * (self.hidden_size + self.slots)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Norm and rotation of the queries, and the softmax."""
        return 2 * self.heads * self.head_size + self.heads * self.slots

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Normed input, queries before and after their norm, weights, what is read, output."""
        return 2 * self.hidden_size + 3 * self.heads * self.head_size + self.heads * self.slots

    @nn.nowrap
    def kept_elements(self) -> int:
        """Queries, weights, and what is read."""
        return 2 * self.heads * self.head_size + self.heads * self.slots

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Products by whole tiles; weights are written down and read."""
        products = 4 * on.tokens * self.heads * tiled(self.head_size) * (self.hidden_size + tiled(self.slots))
        moved = on.tokens * (2 * self.hidden_size + 4 * self.heads * (self.head_size + self.slots)) * BFLOAT16_BYTES
        passes = 3 + on.again.products
        yield Operation("parameter attention", products * passes, moved * passes)
