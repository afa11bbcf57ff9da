"""Eq. 7 as it is written, one gathered expert a token; plain autodiff gives its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expert_linear(
    x: jax.Array, index: jax.Array, score: jax.Array | None, routed: jax.Array, shared: jax.Array | None
) -> jax.Array:
    """Same contract as `ExpertLinear`."""
    score = jnp.ones((x.shape[0], 1), x.dtype) if score is None else score.astype(x.dtype)[:, None]
    chosen = score * jnp.einsum("ta,tab->tb", x, routed[index])
    return chosen if shared is None else chosen + jax.lax.stop_gradient(score) * (x @ shared)
