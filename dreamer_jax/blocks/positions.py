"""Rotary position encodings, along the sequence and along depth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.parameters import Block
from dreamer_jax.config.values import DepthCounters, DepthScaling


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


def rope(x: jax.Array, position: jax.Array, base: float | jax.Array, scaling: tuple[float, ...] = ()) -> jax.Array:
    """Rotary position encoding, rotate-half layout: element i is paired with element i + d/2.

    Args:
        x: [..., d], d even.
        position: broadcastable to x without its last axis; may be traced.
        base: wavelengths grow from 2 pi to 2 pi * base. As an array, one for each position, or one for all.
        scaling: see `scaled`; () for none.

    Returns:
        [..., d] in x's dtype; the rotation itself is float32.
    """
    half = x.shape[-1] // 2
    each = base[..., None] if isinstance(base, jax.Array) else base
    frequency = each ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling:
        frequency = scaled(frequency, scaling)
    angle = jnp.asarray(position, jnp.float32)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def scaled(frequency: jax.Array, scaling: tuple[float, ...]) -> jax.Array:
    """Frequencies for longer texts than a model was trained on at first, as Llama 3.1 to 3.3 have them (`rope_type`
    llama3 in config.json).

    What turns at least `high` times in the texts of before stays; what turns at most `low` times in them turns `factor`
    times more slowly; between, the change is linear in the number of turns.

    Args:
        frequency: in radians a position.
        scaling: factor, low, high, and the length of the texts of before; `model.rope_factor` to `rope_length`.
    """
    factor, low, high, length = scaling
    turns = frequency * (length / (2 * math.pi))
    stays = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (stays + (1 - stays) / factor)


@dataclass(frozen=True)
class DepthCode:
    """How queries and keys are told their depth, in depth attention and in routers.

    Section 3.4: one half of the head counts depths up, the other counts them down. The others are for models that run
    at other depths than they were trained at, which the paper leaves open (section 5).

    Attributes:
        base: of the RoPE.
        counters: "both" as in the paper; "up": the whole head counts up, and nothing asks for L; "learned": no rotation
            but `signal`.
        scaling: what a pass does that goes deeper than `trained`, with s = (L - 1) / (trained - 1). "none": nothing, it
            meets positions it has not seen. "interpolated": positions are divided by s (Chen et al., 2023), so that the
            last of them is a known one. "ntk": the base is multiplied by s^(d / (d - 2)), d being the rotated size: the
            slowest rotation is interpolated, the fastest stays. What YaRN would add keeps wavelengths shorter than the
            trained range as they are; with a dozen depths there is hardly one.
        trained: the deepest pass of training.
    """

    base: float
    counters: DepthCounters
    scaling: DepthScaling
    trained: int

    def __call__(self, x: jax.Array, depth: Depth) -> jax.Array:
        """[..., d] -> [..., d], rotated; `depth` broadcastable to x without its last axis. d is divisible by 4, or
        with "up" by 2."""
        up, down = depth.index, depth.total - 1 - depth.index
        base: float | jax.Array = self.base
        if self.scaling != "none":
            stretch = jnp.maximum((depth.total - 1) / max(self.trained - 1, 1), 1.0)
            if self.scaling == "interpolated":
                up, down = up / stretch, down / stretch
            else:
                size = x.shape[-1] // (2 if self.counters == "both" else 1)
                base = self.base * stretch ** (size / (size - 2))
        if self.counters == "up":
            return rope(x, up, base)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([rope(first, up, base), rope(second, down, base)], axis=-1)

    @property
    def rows(self) -> int:
        """Vectors that it learns."""
        return self.trained if self.counters == "learned" else 0

    def signal(self, table: jax.Array, depth: Depth) -> jax.Array:
        """[..., d] float32, what is added at a depth: its row of a table [trained, d]. Deeper than trained it is the
        last row, or, interpolated, what lies between two rows at place l / s."""
        place = jnp.asarray(depth.index, jnp.float32)
        if self.scaling == "interpolated":
            place = place / jnp.maximum((depth.total - 1) / max(self.trained - 1, 1), 1.0)
        place = jnp.minimum(place, self.trained - 1)
        below = jnp.floor(place).astype(jnp.int32)
        share = (place - below)[..., None]
        rows = table.astype(jnp.float32)
        return (1 - share) * rows[below] + share * rows[jnp.minimum(below + 1, self.trained - 1)]


def tell_depth(block: Block, code: DepthCode | None, depth: Depth, *heads: jax.Array) -> Any:
    """Queries and keys [..., d] of a block as the code has them at a depth, broadcastable to them without their last
    axis. What is learned of depths is a parameter of the block, which all of them share."""
    if code is None:
        return heads
    if code.counters != "learned":
        return tuple(code(x, depth) for x in heads)
    shape = (code.trained, heads[0].shape[-1])
    rows = block.weight("depth_signals", nn.initializers.zeros, shape, ("depths", "norm"), "bias")
    return tuple((x + code.signal(rows, depth)).astype(x.dtype) for x in heads)
