"""A step near a state: what a small change of it comes to one depth later, for Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import Context, Memory
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.families.contract import Family
from dreamer_jax.recurrence import Weights

Changed = Callable[[jax.Array], jax.Array]


def step_near(
    family: Family, weights: Weights, state: Any, inputs: Any, depth: Depth, memory: Memory, context: Context
) -> tuple[Changed, jax.Array]:
    """The step as a function of a change of what it starts from, [B, P, ...] float32 -> what it carries on, and the
    change that is none. Arguments are those of `Family.step`.

    It is a function of `Family.carried`; all else, memories and what a state holds beside, is as it is. Differentiate
    it backwards (`jax.vjp`): experts, attention along depth and all kernels define how gradients go back and nothing
    else, so JAX can't differentiate them forward.
    """
    carried, into = jax.vjp(family.carried, state)

    def after(change: jax.Array) -> jax.Array:
        changed = jax.tree.map(_moved, state, into(change.astype(carried.dtype))[0])
        stepped = family.step(weights, changed, inputs, depth, memory, context)
        return family.carried(family.resumed(weights, stepped.state)).astype(jnp.float32)

    return after, jnp.zeros(carried.shape)


def _moved(leaf: jax.Array, change: jax.Array) -> jax.Array:
    """A leaf of the state with a change; integers and truth values have none."""
    return leaf if change.dtype == jax.dtypes.float0 else leaf + change
