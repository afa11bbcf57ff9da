"""Typed entry of the attention MoE's linear map, and its custom VJP."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.attention_moe import tpu, xla
from pallas_kernels.attention_moe.shapes import Tiles, unsupported
from pallas_kernels.dispatch.accumulate import accumulate, visits_of
from pallas_kernels.dispatch.api import Dispatch, blocks_of, plan_dispatch
from pallas_kernels.fallback import no_kernels_here, say_once


def expert_linear(
    x: jax.Array,
    index: jax.Array,
    score: jax.Array,
    routed: jax.Array,
    shared: jax.Array,
    tape: jax.Array | None = None,
) -> jax.Array:
    """The selected linear expert plus the shared one: s x W_e + stop_gradient(s) x W_shared (Eq. 7).

    Computed forward as one product, s x (W_e + W_shared) (Eq. 8), with Eq. 7's gradient: the score doesn't see
    the shared expert, which is what differentiating Eq. 8 would get wrong.

    In the backward pass of the depth scan (model/recurrence.py) a tape may be given: then routed and shared get no
    gradient, and the tape's gradient is the tape's new value.

    Args:
        x: [T, a], compute dtype.
        index: [T] int32, the selected expert.
        score: [T] float32, its sigmoid score.
        routed: [G, a, b], compute dtype.
        shared: [a, b], compute dtype.
        tape: [G, a, b] float32, see `start_tape`.

    Returns:
        [T, b], compute dtype.
    """
    target = _target()
    reason = no_kernels_here() or unsupported(index.size, routed.shape, x.dtype, target)
    if reason:
        say_once(f"attention MoE without a kernel: {reason}")
        return xla.expert_linear(x, index, score, routed, shared)
    plan = plan_dispatch(index[:, None], routed.shape[0], _tiles(x, routed).block, multiple=target.cores)
    return _expert_linear(x, score, routed, shared, plan, tape)


def start_tape(tokens: int, routed: tuple[int, ...], dtype: jnp.dtype) -> jax.Array | None:
    """The empty tape for the backward pass of a depth scan: totals of the gradient of `routed`, added to in place.

    Their sum over the experts is the gradient of `shared`, which every expert sees.

    Args:
        tokens: T of each depth.
        routed: shape (G, a, b).
        dtype: compute dtype.

    Returns:
        Zeros [G, a, b] float32; None where no kernel runs, and autodiff must do.
    """
    if no_kernels_here() or unsupported(tokens, routed, dtype, _target()):
        return None
    return jnp.zeros(routed, jnp.float32)


@jax.custom_vjp
def _expert_linear(x, score, routed, shared, plan: Dispatch, tape) -> jax.Array:
    return _forward(x, score, routed, shared, plan, tape)[0]


def _forward(x, score, routed, shared, plan, tape):
    tile = _tiles(x, routed).outputs
    product = tpu.forward(_flat(blocks_of(x, plan)), routed, shared, plan, tile=tile, target=_target())
    return score.astype(x.dtype)[:, None] * _of_token(product, plan), (x, score, routed, shared, plan, tape)


def _backward(residuals, d_out):
    x, score, routed, shared, plan, tape = residuals
    chosen, target = _tiles(x, routed), _target()
    rows, d_rows = _flat(blocks_of(x, plan)), _flat(blocks_of(d_out, plan))
    d_x, d_score = tpu.input_gradient(d_rows, rows, routed, shared, plan, tile=chosen.inputs, target=target)
    slot_scores = jnp.append(score, 0.0).at[plan.source.reshape(-1)].get(mode="promise_in_bounds")
    totals = jnp.zeros(routed.shape, jnp.float32) if tape is None else tape
    totals = accumulate(
        [totals[:, None]],
        (slot_scores.astype(x.dtype)[:, None] * rows)[None],
        [d_rows],
        visits_of(plan.num_blocks[None], plan.source.shape[0]),
        block=chosen.block,
        tile=chosen.columns,
        target=target,
    )
    d_routed = totals[0][:, 0]
    d_x = score.astype(x.dtype)[:, None] * _of_token(d_x, plan)
    d_score = _of_token(d_score.reshape(-1), plan).astype(score.dtype)
    if tape is not None:
        return d_x, d_score, None, None, None, d_routed
    return d_x, d_score, d_routed.astype(routed.dtype), jnp.sum(d_routed, axis=0).astype(shared.dtype), None, None


_expert_linear.defvjp(_forward, _backward)


def _of_token(rows, plan):
    return rows.at[plan.slot[:, 0]].get(mode="promise_in_bounds")


def _flat(blocks):
    return blocks.reshape(-1, blocks.shape[-1])


def _target() -> tiles.Generation:
    return tiles.generation() or tiles.INTERPRETED


def _tiles(x, routed) -> Tiles:
    chosen = Tiles.of(x.shape[0], routed.shape, x.dtype, _target())
    assert chosen is not None  # `unsupported` has been asked
    return chosen
