"""Rotary position encodings, along the sequence and along depth."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Depth(NamedTuple):
    """Where positions are on their way through the depths.

    Attributes:
        index: l, int32: [], one number for all, or of each position, [B, P] (flattened, [T]).
        total: L of this pass, int32: [], or as `index`. It may differ from the trained depth.
    """

    index: jax.Array
    total: jax.Array

    def flat(self, *following: int) -> Depth:
        """For T tokens in a row; with 1s, for arrays [T, ...] of that many further axes."""
        return Depth(*(part.reshape(-1, *following) if part.ndim else part for part in self))


def rope(x: jax.Array, position: jax.Array, base: float) -> jax.Array:
    """Rotary position encoding, rotate-half layout: element i is paired with element i + d/2.

    Args:
        x: [..., d], d even.
        position: broadcastable to x without its last axis; may be traced.
        base: wavelengths grow from 2 pi to 2 pi * base.

    Returns:
        [..., d] in x's dtype; the rotation itself is float32.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.asarray(position, jnp.float32)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def depth_rope(x: jax.Array, depth: Depth, base: float) -> jax.Array:
    """Depth position encoding (section 3.4): one half of the head counts depths up, the other counts them down.

    Args:
        x: [..., d], d divisible by 4. Its first half is rotated by l, its second by L - 1 - l, each a full RoPE of size
            d/2.
        depth: broadcastable to x without its last axis.
    """
    up, down = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([rope(up, depth.index, base), rope(down, depth.total - 1 - depth.index, base)], axis=-1)
