"""Norms: statistics in float32, results in the input's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import OnChip, Operation, Reach
from dreamer_jax.blocks.parameters import Block
from pallas_kernels.weights import own

EPSILON = 1e-6


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """Divide by the root mean square over the last axis and scale.

    Args:
        x: [..., c].
        scale: [c], or what broadcasts against x.
    """
    wide = x.astype(jnp.float32)
    if scale.ndim == 1:  # without axes of one, such as of a single head: XLA's CPU backend would take single rows
        wide = wide.reshape(*(size for size in x.shape[:-1] if size > 1), x.shape[-1])
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype).reshape(x.shape)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | float = 0.0, epsilon: float = 1e-5) -> jax.Array:
    """Subtract the mean, divide by the standard deviation over the last axis, scale, and add the bias.

    Args:
        x: [..., c].
        scale, bias: [c].
        epsilon: added to the variance.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    return (centred * inverse * scale + bias).astype(x.dtype)


class LayerNorm(Block):
    """LayerNorm with a learned scale and bias over the last axis (Ba et al., 2016).

    Attributes:
        size: c, for counting; the input's last axis decides.
        epsilon: added to the variance.
        bias: whether there is one.
    """

    size: int = 0
    epsilon: float = 1e-5
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., c] -> [..., c]."""
        scale = self.weight("scale", nn.initializers.ones, (x.shape[-1],), ("norm",), "norm")
        bias: Any = 0.0
        if self.bias:
            bias = self.weight("bias", nn.initializers.zeros, (x.shape[-1],), ("norm",), "bias")
        return layer_norm(x, scale, bias, self.epsilon)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Scale and bias."""
        return (2 if self.bias else 1) * self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """One an element."""
        return self.size

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Nothing of its own, as of `RMSNorm`."""
        return iter(())


class RMSNorm(Block):
    """RMSNorm with a learned scale over the last axis (Zhang & Sennrich, 2019).

    Attributes:
        size: c, for counting; the input's last axis decides.
        epsilon: added to the mean square.
    """

    size: int = 0
    epsilon: float = EPSILON

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., c] -> [..., c]; the leading axes are those of tokens where the scale differs between them."""
        scale = own(self.weight("scale", nn.initializers.ones, (x.shape[-1],), ("norm",), "norm"))
        if scale.ndim == 1:
            return rms_norm(x, scale, self.epsilon)
        by_token = x.reshape(scale.shape[0], -1, x.shape[-1])  # [T, .., c]
        return rms_norm(by_token, scale[:, None], self.epsilon).reshape(x.shape)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """The scale."""
        return self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """One an element."""
        return self.size

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Nothing of its own: what norms read and write is counted with the residual stream."""
        return iter(())
