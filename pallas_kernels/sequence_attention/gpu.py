"""Sequence attention on an NVIDIA GPU: jax.nn.dot_product_attention, by cuDNN's flash attention where it applies."""

from __future__ import annotations

import jax

from pallas_kernels.sequence_attention.shapes import fits_cudnn


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Same contract as `SequenceAttention`.

    Documents are told apart by a mask [B, 1, S, S]: jax's public interface to cuDNN has none for packed rows.
    """
    same_document = (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    implementation = "cudnn" if jax.default_backend() == "gpu" and fits_cudnn(q.shape, q.dtype) else "xla"
    return jax.nn.dot_product_attention(
        q, k.astype(q.dtype), v.astype(q.dtype), mask=same_document, is_causal=True, implementation=implementation
    )
