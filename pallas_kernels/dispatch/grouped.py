"""Grouped matrix products as batches of equal blocks: for the CPU and every platform without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.api import Dispatch, block_size_for


def up(rows: jax.Array, weight: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows times the transpose of their expert's matrix: [N, b, h], [E, f, h] -> [N, b, f]."""
    return jnp.einsum("nbh,nfh->nbf", rows, _weight_of_block(weight, plan))


def down(rows: jax.Array, weight: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows times their expert's matrix: [N, b, f], [E, f, h] -> [N, b, h]."""
    return jnp.einsum("nbf,nfh->nbh", rows, _weight_of_block(weight, plan))


def outer(left: jax.Array, right: jax.Array, plan: Dispatch, into: jax.Array | None = None) -> jax.Array:
    """Sum over each expert's rows of outer products: [N, b, f], [N, b, h] -> [E, f, h] float32, added to `into`.

    Padding rows must be zero in `left` or in `right`, and finite in the other.
    """
    blocks = jnp.einsum("nbf,nbh->nfh", left, right, preferred_element_type=jnp.float32)
    num_experts = plan.first_block.shape[0]
    total = jax.ops.segment_sum(blocks, plan.block_expert, num_experts, indices_are_sorted=True)
    return total if into is None else into + total


def _weight_of_block(weight: jax.Array, plan: Dispatch) -> jax.Array:
    return weight.at[plan.block_expert].get(mode="promise_in_bounds")


class Products(NamedTuple):
    """The three of them, here or as kernels.

    Attributes:
        block_size: (pairs, experts) -> rows of a block that suit them.
    """

    up: Callable[..., jax.Array]
    down: Callable[..., jax.Array]
    outer: Callable[..., jax.Array]
    block_size: Callable[[int, int], int] = block_size_for


XLA = Products(up, down, outer)
