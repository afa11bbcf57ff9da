"""PA: attention of a token over keys and values that are the same at every depth, learned or made of the embeddings of
texts: a dimension of the mixture beside the sequence, the depths and the experts (section 5 leaves it open)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, Counted, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.parameters import Block, normal
from dreamer_jax.blocks.positions import Depth, DepthCode, tell_depth
from pallas_kernels.weights import own


def slots_of(texts: jax.Array, matrix: jax.Array, heads: int, dtype: Any) -> jax.Array:
    """Keys or values [n, M, d] of texts, in the type of the matrix: embeddings [M, e] float32 times a matrix [e, n d],
    both in the compute dtype, summed in float32."""
    size = len(matrix)
    of_heads = matrix.reshape(size, heads, -1).astype(dtype)
    made = jnp.einsum("me,end->nmd", texts.astype(dtype), of_heads, preferred_element_type=jnp.float32)
    return made.astype(matrix.dtype)


class ParameterAttention(Block):
    """softmax(q k / sqrt(d)) v over M slots: learned ones (persistent memory, Sukhbaatar et al., 2019), or texts, whose
    keys and values are maps of their embeddings. Queries are told their depth as those of routers are, so that other
    slots may answer at other depths; keys stay as they are.

    A pass of texts is given their keys and values in the place of the maps (`slots_of`), made once for all depths.

    Attributes:
        hidden_size: h.
        slots: M.
        heads, head_size: n, d; each head has slots of its own.
        code: how queries are told their depth; None: they aren't.
        std, out_std: of the initial matrices.
        every: it acts at depth 0 and every so many-th from there; the mixture sees to it.
        embedding_size: e of texts; 0: slots are learned.
        observe: whether it says which slots were read.
    """

    hidden_size: int
    slots: int
    heads: int
    head_size: int
    code: DepthCode | None
    std: float
    out_std: float
    every: int = 1
    embedding_size: int = 0
    observe: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, real: jax.Array) -> tuple[jax.Array, dict[str, jax.Array] | None]:
        """[B, P, h], normed, and which tokens [T] aren't padding -> [B, P, h]; and with `observe` `slot_scores` [n, M]
        float32, weights summed over those tokens."""
        flat, size = x.reshape(-1, x.shape[-1]), self.heads * self.head_size  # [T, h]
        query = own(self.weight("query", normal(self.std), (self.hidden_size, size), ("hidden", "heads")))
        keys, values = self._slots()
        out = own(self.weight("output", normal(self.out_std), (size, self.hidden_size), ("heads", "hidden")))
        t = "t" * (query.ndim - 2)  # in decoding, layers of their own may be another for every token
        q = jnp.einsum(f"th,{t}hq->tq", flat, query.astype(x.dtype)).reshape(-1, self.heads, self.head_size)
        (q,) = tell_depth(self, self.code, depth.flat(1), RMSNorm(name="q_norm")(q))
        k = RMSNorm(name="k_norm")(keys.astype(x.dtype))
        logits = jnp.einsum(f"tnd,{t}nmd->tnm", q, k, preferred_element_type=jnp.float32) * self.head_size**-0.5
        weights = jax.nn.softmax(logits, axis=-1)
        read = jnp.einsum(f"tnm,{t}nmd->tnd", weights.astype(x.dtype), values.astype(x.dtype)).reshape(-1, size)
        seen = {"slot_scores": jnp.sum(weights * real[:, None, None], axis=0)} if self.observe else None
        return jnp.einsum(f"tq,{t}qh->th", read, out.astype(x.dtype)).reshape(x.shape), seen

    def _slots(self) -> list[jax.Array]:
        """Keys and values, [n, M, d] each, or of every token [T, n, M, d]."""
        shape, axes, std = (self.heads, self.slots, self.head_size), ("norm", "slots", "heads"), self.std
        if e := self.embedding_size:
            shape, axes, std = (e, self.heads * self.head_size), ("embedding", "heads"), (5 * e) ** -0.5
        found = [own(self.weight(name, normal(std), shape, axes)) for name in ("keys", "values")]
        if self.embedding_size and self.is_initializing():
            return [jnp.zeros((self.heads, self.slots, self.head_size))] * 2
        return found

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Both maps, keys and values, two norms, and what is learned of depths. Of texts training stores the maps that
        keys and values are made by, inference what they have made."""
        told = self.code.rows if self.code else 0
        maps = 2 * self.hidden_size * self.heads * self.head_size
        rows = self.slots if folded or not self.embedding_size else self.embedding_size
        return maps + 2 * self.heads * rows * self.head_size + (2 + told) * self.head_size

    @nn.nowrap
    def pass_flops(self) -> float:
        """Keys and values of the texts."""
        return 4 * self.slots * self.embedding_size * self.heads * self.head_size

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
        if self.embedding_size:  # forward, and for the gradient of the maps
            read = self.slots * self.embedding_size * FLOAT32_BYTES
            yield Operation("keys and values of texts", 2 * self.pass_flops(), 4 * read).times(1 / on.depths)


class Texts(Counted):
    """The embeddings of M texts, [M, e] float32: stored and not trained."""

    def __init__(self, texts: int, embedding_size: int):
        self.texts, self.embedding_size = texts, embedding_size

    def untrained_elements(self, folded: bool = False) -> int:
        """Inference has keys and values in their place."""
        return 0 if folded else self.texts * self.embedding_size
