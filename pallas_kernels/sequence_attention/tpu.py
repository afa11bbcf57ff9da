"""Sequence attention on a TPU: jax's splash attention, a flash attention that skips the blocks of the future."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels.kept import KEPT
from pallas_kernels.sequence_attention.shapes import block_of, padded_head
from pallas_kernels.tiles import INTERPRETED, generation


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Same contract as `SequenceAttention`, for shapes that `unsupported` allows."""
    target = generation()
    length, heads, size = q.shape[1:]
    block = block_of(length, (target or INTERPRETED).sequence_block)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            use_fused_bwd_kernel=True,  # dq beside dk and dv: the scores are computed once
        ),
        residual_checkpoint_name=KEPT,
        interpret=target is None,
    )

    def of_row(q, k, v, ids):  # splash attention doesn't scale
        return kernel(q * size**-0.5, k, v, segment_ids=splash.SegmentIds(ids, ids))

    q, k, v = (part.swapaxes(1, 2) for part in (q, k, v))  # [B, n, S, d]
    if missing := padded_head(size) - size:  # zeros change neither scores nor the values that are kept
        q, k, v = (jnp.pad(part, ((0, 0), (0, 0), (0, 0), (0, missing))) for part in (q, k, v))
    out: Any = jax.vmap(of_row)(q, k, v, segment_ids)
    return out[..., :size].swapaxes(1, 2)
