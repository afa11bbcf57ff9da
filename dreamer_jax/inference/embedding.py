"""Embeddings of texts by a model's own states: what it makes of a text, as one row of numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.families import Family, forward

SHORTEST = 16
"""Rows are as long as a power of two, from here: so few programs are compiled."""


def embed(
    family: Family,
    params: Any,
    model_state: dict[str, Any],
    rows: Sequence[Sequence[int]],
    depth: int,
    batch_size: int = 16,
) -> np.ndarray:
    """The mean over a row's tokens, but for its first, of what the head would be applied to, divided by the root of its
    mean square: [N, h] float32.

    Args:
        family, params, model_state: the model.
        rows: tokens of each text behind begin-of-text; two or more.
        depth: L.
        batch_size: rows computed at once.
    """
    found = []
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        length = max(SHORTEST, 1 << (max(map(len, part)) - 1).bit_length())
        tokens, lengths = np.zeros((batch_size, length), np.int32), np.zeros(batch_size, np.int32)
        for place, row in enumerate(part):
            tokens[place, : len(row)], lengths[place] = row, len(row)
        found.append(np.asarray(_means(family, depth, params, model_state, tokens, lengths))[: len(part)])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _means(family: Family, depth: int, params: Any, model_state: Any, tokens: jax.Array, lengths: jax.Array):
    params, place = family.cast(params), jnp.arange(tokens.shape[1])
    real = place < lengths[:, None]
    batch = {"tokens": tokens, "segment_ids": real.astype(jnp.int32)}
    passed = forward(family, params, model_state, batch, depth)
    hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
    counted = (real & (place > 0))[..., None]
    mean = jnp.sum(jnp.where(counted, hidden.astype(jnp.float32), 0), axis=1) / jnp.maximum(lengths[:, None] - 1, 1)
    return mean * jax.lax.rsqrt(jnp.mean(mean**2, axis=-1, keepdims=True) + 1e-12)
