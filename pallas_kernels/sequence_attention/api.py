"""Typed entry of sequence attention: splash attention on a TPU, gpu.py's on a GPU, xla.py's elsewhere."""

from __future__ import annotations

import jax

from pallas_kernels.fallback import no_kernels_here, say_once
from pallas_kernels.sequence_attention import gpu, tpu, xla
from pallas_kernels.sequence_attention.shapes import unsupported


def sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention within each document of a row (Eq. 1); softmax in float32.

    Args:
        q: [B, S, n, d], position-encoded.
        k, v: [B, S, kv, d]; head i of q attends with head i // (n // kv).
        segment_ids: [B, S] int32; tokens see only their own document.

    Returns:
        [B, S, n, d].
    """
    reason = no_kernels_here() or unsupported(q.shape, k.shape[2])
    if reason:
        say_once(f"sequence attention without a kernel: {reason}")
        form = gpu if jax.default_backend() == "gpu" else xla
        return form.sequence_attention(q, k, v, segment_ids)
    return tpu.sequence_attention(q, k.astype(q.dtype), v.astype(q.dtype), segment_ids)
