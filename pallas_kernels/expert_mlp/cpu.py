"""The expert MLP on a CPU, in training: equal shares of rows first, then the rest (see dispatch/shares.py).

Between the products, features come before rows: [n, f, b]. XLA's products of many small matrices on a CPU are up to
three times faster so, and gate and up are halves that lie in one piece.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.shares import Shares, fetch, fetch_or_zero, plan_shares, token_of
from pallas_kernels.kept import keep


def expert_mlp(x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Same contract as `ExpertMLP`, without a tape."""
    return _expert_mlp(x, weights, gate_up, down, plan_shares(indices, gate_up.shape[0]))


@jax.custom_vjp
def _expert_mlp(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array, plan: Shares) -> jax.Array:
    return _forward(x, weights, gate_up, down, plan)[0]


def _forward(x, weights, gate_up, down, plan):
    shape = weights.shape
    gate_and_up = keep(_up(fetch(x, token_of(plan.share, shape)), gate_up))  # [E, 2F, C]
    values = _down(_swiglu(gate_and_up), down)  # [E, C, h]
    out = _sum(plan.of_pairs(values), weights)

    def add(pairs, experts, out):
        tokens = token_of(pairs, shape)
        values = _down(_swiglu(_up(fetch(x, tokens), fetch(gate_up, experts))), fetch(down, experts))
        return _add_rows(out, tokens, values * fetch_or_zero(weights, pairs)[..., None])

    return plan.over_rest(add, out).astype(x.dtype), (x, weights, gate_up, down, plan, gate_and_up)


def _backward(residuals, d_out):
    x, weights, gate_up, down, plan, gate_and_up = residuals
    shape = weights.shape

    def of_rows(pairs, gate_and_up, gate_up, down):
        tokens = token_of(pairs, shape)
        rows, d_rows = fetch(x, tokens), fetch(d_out, tokens)
        gate_and_up = _up(rows, gate_up) if gate_and_up is None else gate_and_up
        return _gradients(rows, gate_and_up, fetch_or_zero(weights, pairs), d_rows, gate_up, down)

    d_x, d_weights, d_gate_up, d_down = of_rows(plan.share, gate_and_up, gate_up, down)
    d_x = _sum(plan.of_pairs(d_x), plan.here)
    d_weights = plan.of_pairs(d_weights).reshape(-1)

    def add(pairs, experts, totals):
        d_x, d_weights, d_gate_up, d_down = totals
        # Of these rows gate and up are computed again: room for the most there could be would have to be kept.
        rows, its_weights, *matrices = of_rows(pairs, None, fetch(gate_up, experts), fetch(down, experts))
        return (
            _add_rows(d_x, token_of(pairs, shape), rows),  # zero for padding, as its weight is
            d_weights.at[pairs].set(its_weights, mode="drop"),
            d_gate_up.at[experts].add(matrices[0], mode="promise_in_bounds"),
            d_down.at[experts].add(matrices[1], mode="promise_in_bounds"),
        )

    d_x, d_weights, d_gate_up, d_down = plan.over_rest(add, (d_x, d_weights, d_gate_up, d_down))
    return (
        d_x.astype(x.dtype),
        d_weights.reshape(shape).astype(weights.dtype),
        d_gate_up.astype(gate_up.dtype),
        d_down.astype(down.dtype),
        None,
    )


_expert_mlp.defvjp(_forward, _backward)


def _gradients(x, gate_and_up, weights, d_out, gate_up, down):
    """Of rows [n, b, h] with weights [n, b], zero for padding, and gradients of their tokens' outputs [n, b, h].

    Returns:
        d_x [n, b, h], d_weights [n, b] (of padding undefined), d_gate_up and d_down, float32.
    """
    scale = weights.astype(x.dtype)[:, None]
    activation, swiglu_vjp = jax.vjp(_swiglu, gate_and_up)
    d_activation = _up(d_out, down)  # before the weight
    # d w_j = <d_out, values_j> = <W_down^T d_out, activation_j>: the values needn't be kept.
    d_weights = jnp.sum((d_activation * activation).astype(jnp.float32), axis=1)
    d_gate_and_up = swiglu_vjp(d_activation * scale)[0]
    return _down(d_gate_and_up, gate_up), d_weights, _outer(d_gate_and_up, x), _outer(activation * scale, d_out)


def _up(rows, weight):
    """[n, b, h], [n, f, h] -> [n, f, b]."""
    return jnp.einsum("nfh,nbh->nfb", weight, rows)


def _down(rows, weight):
    """[n, f, b], [n, f, h] -> [n, b, h]."""
    return jnp.einsum("nfb,nfh->nbh", rows, weight)


def _outer(left, right):
    """[n, f, b], [n, b, h] -> [n, f, h] float32."""
    return jnp.einsum("nfb,nbh->nfh", left, right, preferred_element_type=jnp.float32)


def _sum(rows, weights):
    """A token's rows, weighted: [T, k, h], [T, k] -> [T, h] float32."""
    return jnp.einsum("tkh,tk->th", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _add_rows(out, tokens, rows):
    """Rows added to those of their tokens, one after another."""
    flat = rows.reshape(-1, rows.shape[-1]).astype(out.dtype)
    return out.at[tokens.reshape(-1)].add(flat, mode="promise_in_bounds")


def _swiglu(gate_and_up):
    gate, up = jnp.split(gate_and_up, 2, axis=1)
    return jax.nn.silu(gate) * up
