"""The attention MoE's linear map over blocks of rows: on GPUs by kernels, on a TPU, for shapes that no kernel takes, as
batches."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.attention_moe.tape import LinearTape
from pallas_kernels.dispatch import grouped
from pallas_kernels.dispatch.api import Dispatch, blocks_of, plan_dispatch, rows_of


def expert_linear(
    x: jax.Array,
    index: jax.Array,
    score: jax.Array,
    routed: jax.Array,
    shared: jax.Array | None,
    tape: LinearTape | None = None,
    products: grouped.Products = grouped.XLA,
) -> jax.Array:
    """Same contract as `ExpertLinear`; a tape has no rows aside."""
    num_experts = routed.shape[0]
    plan = plan_dispatch(index[:, None], num_experts, products.block_size(index.size, num_experts))
    return _expert_linear(x, score, routed, shared, plan, tape, products)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _expert_linear(x, score, routed, shared, plan: Dispatch, tape, products) -> jax.Array:
    return _forward(x, score, routed, shared, plan, tape, products)[0]


def _forward(x, score, routed, shared, plan, tape, products):
    folded = routed if shared is None else routed + shared
    product = rows_of(products.down(blocks_of(x, plan), folded, plan), plan)[:, 0]  # [T, b]
    return score.astype(x.dtype)[:, None] * product, (x, score, routed, shared, plan, tape)


def _backward(products, residuals, d_out):
    x, score, routed, shared, plan, tape = residuals
    scale = score.astype(x.dtype)[:, None]
    real = (plan.source < x.shape[0])[..., None].astype(x.dtype)  # zero for padding slots
    d_rows = blocks_of(d_out, plan)
    # Through the routed expert alone: this is all the score may see.
    d_routed_x = rows_of(products.up(d_rows, routed, plan), plan)[:, 0]  # [T, a]
    d_score = jnp.sum((x * d_routed_x).astype(jnp.float32), axis=-1).astype(score.dtype)
    d_x = scale * (d_routed_x if shared is None else d_routed_x + d_out @ shared.T)
    factors = blocks_of(scale * x, plan) * real, d_rows
    if tape is not None:
        return d_x, d_score, None, None, None, replace(tape, totals=products.outer(*factors, plan, into=tape.totals))
    d_routed = products.outer(*factors, plan)
    d_shared = None if shared is None else jnp.sum(d_routed, axis=0).astype(shared.dtype)
    return d_x, d_score, d_routed.astype(routed.dtype), d_shared, None, None


_expert_linear.defvjp(_forward, _backward)
