"""Typed entry of the attention MoE's linear map."""

from __future__ import annotations

import jax

from pallas_kernels.attention_moe import xla


def expert_linear(x: jax.Array, index: jax.Array, score: jax.Array, routed: jax.Array, shared: jax.Array) -> jax.Array:
    """The selected linear expert plus the shared one: s x W_e + stop_gradient(s) x W_shared (Eq. 7).

    Computed forward as one product, s x (W_e + W_shared) (Eq. 8), with Eq. 7's gradient: the score doesn't see
    the shared expert, which is what differentiating Eq. 8 would get wrong.

    Args:
        x: [T, a], compute dtype.
        index: [T] int32, the selected expert.
        score: [T] float32, its sigmoid score.
        routed: [G, a, b], compute dtype.
        shared: [a, b], compute dtype.

    Returns:
        [T, b], compute dtype.
    """
    return xla.expert_linear(x, index, score, routed, shared)
