"""RMSNorm, rotary position encodings and the initialisers of SPEC.md section 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

EPSILON = 1e-6

Initializer = Callable[..., Any]
"""(key, shape, dtype) -> an array boxed with the names of its axes."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """Rows of the embedding: [V, h] float32, [B, S] int32 -> [B, S, h] in `dtype`; numbers out of range are clipped.

    The table is cast before the look-up, so that one gathered in `dtype` is never widened. Its gradient is summed
    over the occurrences of a token in float32 all the same.
    """
    return table.astype(dtype).at[tokens].get(mode="clip")


def _embed_forward(table, tokens, dtype):
    return embed(table, tokens, dtype), (table, tokens)


def _embed_backward(dtype, residuals, d_out):
    table, tokens = residuals
    return jnp.zeros_like(table).at[jnp.clip(tokens, 0, len(table) - 1)].add(d_out.astype(table.dtype)), None


embed.defvjp(_embed_forward, _embed_backward)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last axis and scale; statistics in float32, result in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale over the last axis (Zhang & Sennrich, 2019)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., c] -> [..., c]."""
        return rms_norm(x, self.param("scale", norm_init(), (x.shape[-1],), jnp.float32))


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


def depth_rope(x: jax.Array, depth: jax.Array, total_depth: jax.Array, base: float) -> jax.Array:
    """Depth position encoding (section 3.4): one half of the head counts depths up, the other counts them down.

    Args:
        x: [..., d], d divisible by 4. Its first half is rotated by `depth`, its second by `total_depth - 1 - depth`,
            each a full RoPE of size d/2.
        depth: scalar l, from 0.
        total_depth: scalar L of this forward pass, which may differ from the trained one.
    """
    up, down = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([rope(up, depth, base), rope(down, total_depth - 1 - depth, base)], axis=-1)


def norm_init() -> Initializer:
    """Ones: norm scales."""
    return nn.with_logical_partitioning(nn.initializers.ones, ("norm",))


def input_init(hidden_size: int, axes: tuple[str | None, ...]) -> Initializer:
    """N(0, 1/(5h)): every matrix but the output projections (Table 3)."""
    return nn.with_logical_partitioning(nn.initializers.normal((1 / (5 * hidden_size)) ** 0.5), axes)


def output_init(hidden_size: int, depth: int, attentions: int, axes: tuple[str | None, ...]) -> Initializer:
    """N(0, 1/(2.5 h L n)), n attentions in the mixture: output projections and experts' down projections (Table 3)."""
    std = (1 / (2.5 * hidden_size * depth * attentions)) ** 0.5
    return nn.with_logical_partitioning(nn.initializers.normal(std), axes)
