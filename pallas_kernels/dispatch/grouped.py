"""Grouped matrix products as batches of equal blocks: for the CPU and every platform without a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.api import Dispatch


def up(rows: jax.Array, weight: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows times the transpose of their expert's matrix: [N, b, h], [E, f, h] -> [N, b, f]."""
    return jnp.einsum("nbh,nfh->nbf", rows, _weight_of_block(weight, plan))


def down(rows: jax.Array, weight: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows times their expert's matrix: [N, b, f], [E, f, h] -> [N, b, h]."""
    return jnp.einsum("nbf,nfh->nbh", rows, _weight_of_block(weight, plan))


def outer(left: jax.Array, right: jax.Array, plan: Dispatch) -> jax.Array:
    """Sum over each expert's rows of outer products: [N, b, f], [N, b, h] -> [E, f, h] float32.

    Padding rows must be zero in `left` or in `right`.
    """
    blocks = jnp.einsum("nbf,nbh->nfh", left, right, preferred_element_type=jnp.float32)
    num_experts = plan.first_block.shape[0]
    return jax.ops.segment_sum(blocks, plan.block_expert, num_experts, indices_are_sorted=True)


def _weight_of_block(weight: jax.Array, plan: Dispatch) -> jax.Array:
    return weight.at[plan.block_expert].get(mode="promise_in_bounds")
