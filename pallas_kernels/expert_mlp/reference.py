"""The definition, one gathered expert a (token, choice) pair: exact FLOPs, far too much memory for real sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expert_mlp(x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Same contract as `ExpertMLP`, by plain autodiff."""
    gate, up = jnp.split(jnp.einsum("th,tkfh->tkf", x, gate_up[indices]), 2, axis=-1)
    values = jnp.einsum("tkf,tkfh->tkh", jax.nn.silu(gate) * up, down[indices])
    return jnp.einsum("tkh,tk->th", values, weights.astype(values.dtype))
