"""Typed entry of the expert MLP."""

from __future__ import annotations

import jax

from pallas_kernels.expert_mlp import xla


def expert_mlp(x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Sum of the selected experts' SwiGLU outputs, weighted: sum_j w_j W_down(silu(W_gate x) * (W_up x)).

    Dropless and deterministic. Differentiable in x, weights, gate_up and down.

    Args:
        x: [T, h], compute dtype.
        indices: [T, k] int32, selected experts, different within a token. E stands for no expert here: the pair adds
            nothing, gets no gradient and takes no block (expert parallelism: it is another device's).
        weights: [T, k] float32.
        gate_up: [E, 2F, h], W_gate's F rows, then W_up's; compute dtype.
        down: [E, F, h], compute dtype.

    Returns:
        [T, h], compute dtype.
    """
    return xla.expert_mlp(x, indices, weights, gate_up, down)
