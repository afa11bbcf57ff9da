"""The attention MoE's linear map as batches of equal blocks: for GPUs, on a TPU for shapes no kernel takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import grouped
from pallas_kernels.dispatch.api import Dispatch, block_size_for, blocks_of, plan_dispatch, rows_of


def expert_linear(
    x: jax.Array, index: jax.Array, score: jax.Array, routed: jax.Array, shared: jax.Array | None
) -> jax.Array:
    """Same contract as `ExpertLinear`, without a tape."""
    num_experts = routed.shape[0]
    plan = plan_dispatch(index[:, None], num_experts, block_size_for(index.size, num_experts))
    return _expert_linear(x, score, routed, shared, plan)


@jax.custom_vjp
def _expert_linear(
    x: jax.Array, score: jax.Array, routed: jax.Array, shared: jax.Array | None, plan: Dispatch
) -> jax.Array:
    return _forward(x, score, routed, shared, plan)[0]


def _forward(x, score, routed, shared, plan):
    folded = routed if shared is None else routed + shared
    product = rows_of(grouped.down(blocks_of(x, plan), folded, plan), plan)[:, 0]  # [T, b]
    return score.astype(x.dtype)[:, None] * product, (x, score, routed, shared, plan)


def _backward(residuals, d_out):
    x, score, routed, shared, plan = residuals
    scale = score.astype(x.dtype)[:, None]
    real = (plan.source < x.shape[0])[..., None].astype(x.dtype)  # zero for padding slots
    # Through the routed expert alone: this is all the score may see.
    d_routed_x = rows_of(grouped.up(blocks_of(d_out, plan), routed, plan), plan)[:, 0]  # [T, a]
    d_score = jnp.sum((x * d_routed_x).astype(jnp.float32), axis=-1)
    d_x = scale * (d_routed_x if shared is None else d_routed_x + d_out @ shared.T)
    d_routed = grouped.outer(blocks_of(scale * x, plan) * real, blocks_of(d_out, plan), plan)
    d_shared = None if shared is None else jnp.sum(d_routed, axis=0).astype(shared.dtype)
    return d_x, d_score.astype(score.dtype), d_routed.astype(routed.dtype), d_shared, None


_expert_linear.defvjp(_forward, _backward)
