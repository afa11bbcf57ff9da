"""Sequence attention on a TPU: forward.py, and jax's splash attention backward, which skips blocks of the future."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels.kept import keep
from pallas_kernels.sequence_attention import forward
from pallas_kernels.sequence_attention.shapes import block_of, largest_block, padded_head
from pallas_kernels.tiles import INTERPRETED, generation


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Same contract as `SequenceAttention`, for shapes that `unsupported` allows."""
    size = q.shape[-1]
    q, k, v = (part.swapaxes(1, 2) for part in (q * size**-0.5, k, v))  # [B, n, S, d]
    if missing := padded_head(size) - size:  # zeros change neither scores nor the values that are kept
        q, k, v = (jnp.pad(part, ((0, 0), (0, 0), (0, 0), (0, missing))) for part in (q, k, v))
    return _attend(q, k, v, segment_ids)[..., :size].swapaxes(1, 2)


@jax.custom_vjp
def _attend(q, k, v, segment_ids):
    return forward.attend(q, k, v, segment_ids, _block(q))[0]


def _forward(q, k, v, segment_ids):
    out, logs = map(keep, forward.attend(q, k, v, segment_ids, _block(q)))
    return out, (q, k, v, segment_ids, out, logs)


def _backward(residuals, d_out):
    q, k, v, segment_ids, out, logs = residuals
    block, heads, length = _block(q), *q.shape[1:3]
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            use_fused_bwd_kernel=True,  # dq beside dk and dv: the scores are computed once
        ),
        interpret=generation() is None,
    )

    def of_row(q, k, v, ids, out, logs, d_out):
        # Not public, but the same in every version from 0.10 to 0.12: otherwise only its own forward pass leads there.
        kept = q, k, v, splash.SegmentIds(ids, ids), None, out, logs, kernel.dq_mask_info, kernel.dkv_mask_info
        return splash._splash_attention_bwd(**kernel.kwargs, res=kept, do=d_out)[3:6]

    d_q, d_k, d_v = jax.vmap(of_row)(q, k, v, segment_ids, out, logs, d_out)
    return d_q, d_k, d_v, None


_attend.defvjp(_forward, _backward)


def _block(q):
    return block_of(q.shape[2], largest_block(q.shape[3], q.dtype, generation() or INTERPRETED))
