"""Typed entry of sequence attention: tpu.py's kernels on a TPU, gpu.py's form on a GPU, xla.py's elsewhere."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Implementation
from pallas_kernels import backend as backends
from pallas_kernels import tiles
from pallas_kernels.backend import backend
from pallas_kernels.sequence_attention import gpu, paged, slots, slots_triton, tpu, xla
from pallas_kernels.sequence_attention.shapes import unsupported


@dataclass(frozen=True)
class SequenceAttention:
    """Causal attention within each document of a row (Eq. 1); softmax in float32.

    Attributes:
        implementation: see `pallas_kernels.backend`.
    """

    implementation: Implementation = "auto"

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Whole rows over themselves; differentiable in q, k and v.

        Args:
            q: [B, S, n, d], position-encoded.
            k, v: [B, S, kv, d]; head i of q attends with head i // (n // kv).
            segment_ids: [B, S] int32; tokens see only their own document.

        Returns:
            [B, S, n, d].
        """
        why = functools.partial(unsupported, q.shape, k.shape[2])
        chosen = backend("sequence attention", self.implementation, why, lambda: None)
        if chosen == "pallas":
            return tpu.sequence_attention(q, k.astype(q.dtype), v.astype(q.dtype), segment_ids)
        return (gpu if chosen == "gpu" else xla).sequence_attention(q, k, v, segment_ids)

    def over_slots(
        self,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array | None,
        depths: jax.Array,
        positions: jax.Array,
        table: jax.Array | None = None,
        kv_heads: int = 0,
    ) -> jax.Array:
        """Positions in flight over the cache of their row; see `slots.sequence_attention`, which runs everywhere.

        On a GPU one position a row has a kernel.

        With a table the cache is in pages, and without values it is `interleaved`, for a kernel that reads pages where
        they lie.
        """
        if values is None:
            assert table is not None
            if depths.ndim < 3 and self.interleaves(keys.shape[3] // 2, keys.shape[4], keys.dtype):
                return paged.attention(q, keys, depths, positions, table)
            keys, values = paged.apart(keys)
        on_gpu = self.implementation != "xla" and backends.on_gpu()
        kernel = on_gpu and slots_triton.unsupported(q.shape, keys, depths) is None
        if kernel:
            return slots_triton.attention(q, keys, values, depths, positions, table)
        return slots.sequence_attention(q, keys, values, depths, positions, table, kv_heads)

    def interleaves(self, kv_heads: int, size: int, dtype: Any) -> bool:
        """Whether keys and values of these heads lie together in pages, for the kernel."""
        itemsize = jnp.dtype(dtype).itemsize
        why = functools.partial(paged.unsupported, kv_heads, size, itemsize)
        return backend("paged attention", self.implementation, why) == "pallas"

    def flattens(self) -> bool:
        """Whether rows, and pages that no kernel reads, have their heads side by side, see `pages.flat`: on a TPU."""
        return tiles.generation() is not None
