"""The expert MLP over blocks of rows: on GPUs by kernels, on a TPU, for shapes that no kernel takes, as batches."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import grouped
from pallas_kernels.dispatch.api import Dispatch, blocks_of, plan_dispatch, rows_of
from pallas_kernels.expert_mlp.tape import ExpertTape
from pallas_kernels.kept import keep


def expert_mlp(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    tape: ExpertTape | None = None,
    products: grouped.Products = grouped.XLA,
) -> jax.Array:
    """Same contract as `ExpertMLP`; a tape has no rows aside."""
    num_experts = gate_up.shape[0]
    plan = plan_dispatch(indices, num_experts, products.block_size(indices.size, num_experts))
    # A pair without an expert has a padding slot: weighted by nothing, it adds nothing and has exactly zero gradients.
    return _expert_mlp(x, jnp.where(indices < num_experts, weights, 0), gate_up, down, plan, tape, products)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _expert_mlp(x, weights, gate_up, down, plan: Dispatch, tape, products) -> jax.Array:
    return _forward(x, weights, gate_up, down, plan, tape, products)[0]


def _forward(x, weights, gate_up, down, plan, tape, products):
    gate_and_up = keep(products.up(blocks_of(x, plan), gate_up, plan))  # [N, b, 2F]
    values = products.down(_swiglu(gate_and_up), down, plan)  # [N, b, h]
    counted = jnp.where((weights != 0)[..., None], rows_of(values, plan), 0)  # nothing times NaN would be NaN
    out = jnp.einsum("tkh,tk->th", counted, weights.astype(x.dtype))
    return out, (x, weights, gate_up, down, plan, gate_and_up, tape)


def _backward(products, residuals, d_out):
    x, weights, gate_up, down, plan, gate_and_up, tape = residuals
    # The weight of each slot, zero for padding: it masks every sum over slots below.
    slot_weight = jnp.append(weights.reshape(-1), 0.0).at[plan.source].get(mode="promise_in_bounds")
    slot_weight = slot_weight[..., None].astype(x.dtype)  # [N, b, 1]
    activation, swiglu_vjp = jax.vjp(_swiglu, gate_and_up)

    d_values = blocks_of(d_out, plan)  # [N, b, h], before the weight
    d_activation = products.up(d_values, down, plan)  # [N, b, F], likewise
    # d w_j = <d_out, values_j> = <W_down^T d_out, activation_j>: the values needn't be kept.
    d_weights = jnp.sum((d_activation * activation).astype(jnp.float32), axis=-1, keepdims=True)
    d_gate_and_up = swiglu_vjp(d_activation * slot_weight)[0]
    d_x = jnp.sum(rows_of(products.down(d_gate_and_up, gate_up, plan), plan), axis=1).astype(x.dtype)
    d_weights = rows_of(d_weights, plan)[..., 0].astype(weights.dtype)
    factors = (d_gate_and_up, blocks_of(x, plan)), (activation * slot_weight, d_values)
    if tape is not None:
        gate_up_total = products.outer(*factors[0], plan, into=tape.gate_up)
        down_total = products.outer(*factors[1], plan, into=tape.down)
        return d_x, d_weights, None, None, None, replace(tape, gate_up=gate_up_total, down=down_total)
    d_gate_up, d_down = (products.outer(*pair, plan) for pair in factors)
    return d_x, d_weights, d_gate_up.astype(gate_up.dtype), d_down.astype(down.dtype), None, None


_expert_mlp.defvjp(_forward, _backward)


def _swiglu(gate_and_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_and_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
