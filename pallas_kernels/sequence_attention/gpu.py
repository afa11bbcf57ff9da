"""Sequence attention on an NVIDIA GPU: by our kernels, else by jax.nn.dot_product_attention, by cuDNN where it can."""

from __future__ import annotations

import jax

from pallas_kernels.sequence_attention import triton
from pallas_kernels.sequence_attention.shapes import fits_cudnn


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Same contract as `SequenceAttention`.

    Without a kernel of ours documents are told apart by a mask [B, 1, S, S]: jax's public interface to cuDNN
    has nothing else for packed rows.
    """
    if triton.unsupported(q.shape, k.shape[2], q.dtype) is None:
        return triton.sequence_attention(q, k.astype(q.dtype), v.astype(q.dtype), segment_ids)
    same_document = (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    implementation = "cudnn" if jax.default_backend() == "gpu" and fits_cudnn(q.shape, q.dtype) else "xla"
    return jax.nn.dot_product_attention(
        q, k.astype(q.dtype), v.astype(q.dtype), mask=same_document, is_causal=True, implementation=implementation
    )
