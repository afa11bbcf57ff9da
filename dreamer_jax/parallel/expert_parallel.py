"""Expert parallelism: every device of an `expert` group has some of the experts and a share of the tokens.

Dropless: every token reaches every expert it selected, whatever the balance.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

ExpertMLP = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [T, h], indices [T, k], weights [T, k], gate_up, down) -> [T, h]."""


def gathered_experts(local: ExpertMLP, axis: str) -> ExpertMLP:
    """An `Operations.expert_mlp` in which all tokens of the group visit every device, and the results are summed.

    Each device computes the choices that fall on its own experts: those numbered `E' j` to `E' (j + 1) - 1`, for the
    j-th device of the group and the E' experts that the matrices it is given have.

    Args:
        local: the operation on one device.
        axis: mesh axis of the group.
    """

    def expert_mlp(x, indices, weights, gate_up, down, **how):
        x, indices, weights = (jax.lax.all_gather(rows, axis, tiled=True) for rows in (x, indices, weights))
        held = gate_up.shape[0]
        own = indices - jax.lax.axis_index(axis) * held
        mine = (own >= 0) & (own < held)
        out = local(x, jnp.where(mine, own, held), weights, gate_up, down, **how)
        return jax.lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)

    return expert_mlp
