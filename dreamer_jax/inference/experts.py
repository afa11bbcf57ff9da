"""Linear and MLP experts for any number of tokens: few read their own copies of weights, many are sorted by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels.expert_mlp.reference
from pallas_kernels.dispatch import block_size_for, blocks_of, grouped, plan_dispatch, rows_of
from pallas_kernels.expert_mlp import expert_mlp

FEW = 4
"""Tokens up to which each reads its own copy of its experts' weights."""


def linear(x: jax.Array, index: jax.Array, weight: jax.Array) -> jax.Array:
    """x times the matrix of each row's expert.

    Args:
        x: [T, a].
        index: [T] int32, or a scalar for all rows.
        weight: [G, a, b].

    Returns:
        [T, b].
    """
    if index.ndim == 0:
        return x @ jax.lax.dynamic_index_in_dim(weight, index, 0, keepdims=False)
    if x.shape[0] <= FEW:
        return jnp.einsum("ta,tab->tb", x, weight.at[index].get(mode="promise_in_bounds"))
    plan = plan_dispatch(index[:, None], weight.shape[0], block_size_for(index.size, weight.shape[0]))
    return rows_of(grouped.down(blocks_of(x, plan), weight, plan), plan)[:, 0]


def mlp(x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Same contract as `pallas_kernels.expert_mlp.expert_mlp`."""
    few = x.shape[0] <= FEW
    return (pallas_kernels.expert_mlp.reference.expert_mlp if few else expert_mlp)(x, indices, weights, gate_up, down)
