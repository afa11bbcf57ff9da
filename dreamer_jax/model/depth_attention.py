"""DA: attention of a token over its own earlier depths and the current one (section 3.4)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model import attention_moe
from dreamer_jax.model.attention_moe import Projections
from dreamer_jax.model.operations import Operations
from dreamer_jax.model.primitives import RMSNorm, depth_rope
from pallas_kernels.depth_attention import DepthCache
from pallas_kernels.kept import keep


class DepthAttention(nn.Module):
    """Tokens look back at what they were at shallower depths; nothing crosses tokens."""

    config: DreamerConfig
    operations: Operations

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        depth: jax.Array,
        cache: DepthCache,
        bias: jax.Array | None,
        context,
        tape: Any = None,
        maps_tape: attention_moe.Tape = None,
    ) -> tuple[jax.Array, DepthCache, jax.Array | None]:
        """One depth of depth attention.

        Args:
            x: [B, S, h].
            depth: scalar int32, l.
            cache: filled below `depth`.
            tape: in the backward pass of the depth scan, the operation's own.
            maps_tape: likewise, that of the projections.

        Returns:
            out [B, S, h]; the cache with slot `depth` filled; counts of the attention MoE [G] int32, None in LA.
        """
        config = self.config
        heads, kv_heads, size = config.da_heads, config.da_kv_heads, config.da_head_size
        project = Projections(config, self.operations, (heads + 2 * kv_heads) * size, heads * size, name="projections")
        flat = x.reshape(-1, x.shape[-1])  # [T, h]
        choice, counts = project.route(flat, depth, context.total_depth, bias, context.real)
        qkv = keep(project.qkv(flat, choice, maps_tape)).reshape(flat.shape[0], -1, size)  # [T, n + 2 kv, d]
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
        q = depth_rope(RMSNorm(name="q_norm")(q), depth, context.total_depth, config.depth_rope_base)
        k = depth_rope(RMSNorm(name="k_norm")(k), depth, context.total_depth, config.depth_rope_base)
        attended, cache = self.operations.depth_attention(q, k, v, cache, depth, tape)
        out = project.out(attended.reshape(flat.shape[0], -1), choice, maps_tape)
        return out.reshape(x.shape), cache, counts
