"""Eq. 7 as it is written, one gathered expert a token; plain autodiff gives its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expert_linear(x: jax.Array, index: jax.Array, score: jax.Array, routed: jax.Array, shared: jax.Array) -> jax.Array:
    """Same contract as `ExpertLinear`."""
    score = score.astype(x.dtype)[:, None]
    chosen = jnp.einsum("ta,tab->tb", x, routed[index])
    return score * chosen + jax.lax.stop_gradient(score) * (x @ shared)
