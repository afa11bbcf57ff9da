"""SA: grouped-query causal attention over the sequence (section 3.3)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model.attention_moe import Projections, Tape
from dreamer_jax.model.operations import Operations
from dreamer_jax.model.primitives import RMSNorm, rope
from pallas_kernels.kept import keep


class SequenceAttention(nn.Module):
    """Tokens look at earlier tokens of their document, at the same depth."""

    config: DreamerConfig
    operations: Operations

    @nn.compact
    def __call__(self, x: jax.Array, depth: jax.Array, bias: jax.Array | None, context, tape: Tape = None):
        """[B, S, h] -> ([B, S, h], counts of the attention MoE [G] int32, or None in LA); `tape` is the maps'."""
        config = self.config
        heads, kv_heads, size = config.sa_heads, config.sa_kv_heads, config.sa_head_size
        project = Projections(config, self.operations, (heads + 2 * kv_heads) * size, heads * size, name="projections")
        flat = x.reshape(-1, x.shape[-1])  # [T, h]
        choice, counts = project.route(flat, depth, context.total_depth, bias, context.real)
        qkv = keep(project.qkv(flat, choice, tape)).reshape(*x.shape[:2], -1, size)  # [B, S, n + 2 kv, d]
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        position = context.positions[:, :, None]
        q = rope(RMSNorm(name="q_norm")(q), position, config.sa_rope_base)
        k = rope(RMSNorm(name="k_norm")(k), position, config.sa_rope_base)
        attended = self.operations.sequence_attention(q, k, v, context.segment_ids)
        return project.out(attended.reshape(flat.shape[0], -1), choice, tape).reshape(x.shape), counts
