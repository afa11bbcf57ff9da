"""How far states still move: the change of a step, and the steps that a token needs to settle.

This is asked of models that get their input anew at every depth (the flag `injects_inputs`): their states can converge
to something that depends on the input, whatever the first state was (Geiping et al., 2025, section 3.1). A model whose
input is only its first state has no such place to go to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

SETTLED = 0.03
"""A change below this share of the state counts as none: where Huginn's criterion on latent states stops a token."""
EDGES = np.logspace(-4, 1, 21)
"""Of the bins that changes are counted in; the first and the last take what is beyond them."""


def change(before: jax.Array, after: jax.Array) -> jax.Array:
    """|s_l - s_{l-1}| / |s_l| of states [..., h], [...] float32."""
    before, after = before.astype(jnp.float32), after.astype(jnp.float32)
    return jnp.linalg.norm(after - before, axis=-1) / jnp.maximum(jnp.linalg.norm(after, axis=-1), 1e-30)


def steps_to_settle(changes: jax.Array) -> jax.Array:
    """Steps until all that follow change a state by less than SETTLED.

    Args:
        changes: [L, ...], by step.

    Returns:
        [...] int32: the last step, counted from 1, whose change isn't below it. 0 if there is none; L means that the
        last step still moved, so the state has not settled.
    """
    moves = ~(jnp.asarray(changes) < SETTLED)  # a change that isn't finite moves
    return (jnp.arange(1, len(moves) + 1) * jnp.moveaxis(moves, 0, -1)).max(axis=-1)


def count_changes(changes: jax.Array, real: jax.Array) -> dict[str, jax.Array]:
    """Sums over tokens: `settled` [L+1] by steps to settle, `changes` [L, BINS] by step and bin of EDGES; int32.

    Args:
        changes: [L, T].
        real: [T] bool, the tokens that count.
    """

    def count(numbers: jax.Array, length: int) -> jax.Array:
        return jnp.zeros(length, jnp.int32).at[numbers].add(real)

    bins = jnp.searchsorted(EDGES[1:-1].astype(np.float32), changes, side="right")
    by_step = [count(row, len(EDGES) - 1) for row in bins]
    return {"settled": count(steps_to_settle(changes), len(changes) + 1), "changes": jnp.stack(by_step)}
