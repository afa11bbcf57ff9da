"""The attention MoE's linear map on a CPU, in training: equal shares of rows first, then the rest (see
dispatch/shares.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.shares import Shares, fetch, fetch_or_zero, plan_shares, token_of


def expert_linear(
    x: jax.Array, index: jax.Array, score: jax.Array, routed: jax.Array, shared: jax.Array | None
) -> jax.Array:
    """Same contract as `ExpertLinear`, without a tape."""
    return _expert_linear(x, score, routed, shared, plan_shares(index[:, None], routed.shape[0]))


@jax.custom_vjp
def _expert_linear(
    x: jax.Array, score: jax.Array, routed: jax.Array, shared: jax.Array | None, plan: Shares
) -> jax.Array:
    return _forward(x, score, routed, shared, plan)[0]


def _forward(x, score, routed, shared, plan):
    folded = routed if shared is None else routed + shared
    product = _every_token(x, folded, plan, "nra,nab->nrb")
    return score.astype(x.dtype)[:, None] * product, (x, score, routed, shared, plan)


def _backward(residuals, d_out):
    x, score, routed, shared, plan = residuals
    scale = score.astype(x.dtype)[:, None]
    # Through the routed expert alone: this is all the score may see.
    d_routed_x = _every_token(d_out, routed, plan, "nrb,nab->nra")
    d_score = jnp.sum((x * d_routed_x).astype(jnp.float32), axis=-1)
    d_x = scale * (d_routed_x if shared is None else d_routed_x + d_out @ shared.T)

    def outer(pairs):
        tokens = token_of(pairs, plan.place.shape)
        rows = fetch(x, tokens) * fetch_or_zero(scale, pairs)[..., None]
        return jnp.einsum("nra,nrb->nab", rows, fetch(d_out, tokens), preferred_element_type=jnp.float32)

    def add(pairs, experts, total):
        return total.at[experts].add(outer(pairs), mode="promise_in_bounds")

    d_routed = plan.over_rest(add, outer(plan.share))
    d_shared = None if shared is None else jnp.sum(d_routed, axis=0).astype(shared.dtype)
    return d_x, d_score.astype(score.dtype), d_routed.astype(routed.dtype), d_shared, None


_expert_linear.defvjp(_forward, _backward)


def _every_token(x, matrices, plan, product):
    """x [T, .] times the matrix of each token's expert, as `product` spells it for rows [n, r, .]: [T, .]."""
    shape = plan.place.shape  # [T, 1]
    first = jnp.einsum(product, fetch(x, token_of(plan.share, shape)), matrices)
    out = plan.of_pairs(first)[:, 0]

    def put(pairs, experts, out):
        values = jnp.einsum(product, fetch(x, token_of(pairs, shape)), fetch(matrices, experts))
        return out.at[pairs].set(values, mode="drop")

    return plan.over_rest(put, out)
