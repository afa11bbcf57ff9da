"""Typed entry of the attention MoE's linear map, and its custom VJP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Implementation
from pallas_kernels.attention_moe import cpu, in_place, tpu, xla
from pallas_kernels.attention_moe.shapes import Tiles, unsupported
from pallas_kernels.backend import backend, on_cpu, target
from pallas_kernels.dispatch.accumulate import accumulate, visits_of
from pallas_kernels.dispatch.api import Dispatch, blocks_of, plan_dispatch
from pallas_kernels.tape import Tape
from pallas_kernels.weights import OutputRows, transposed


class LinearTape(flax.struct.PyTreeNode, Tape):
    """Totals of the gradient of `routed`, added to in place; their sum over the experts is the gradient of `shared`.

    Attributes:
        totals: [G, a, b] float32.
    """

    totals: jax.Array


@dataclass(frozen=True)
class ExpertLinear:
    """The selected linear expert plus the shared one: s x W_e + stop_gradient(s) x W_shared (Eq. 7).

    Computed forward as one product, s x (W_e + W_shared) (Eq. 8), with Eq. 7's gradient: the score doesn't see
    the shared expert, which is what differentiating Eq. 8 would get wrong.

    Attributes:
        implementation: see `pallas_kernels.backend`.
    """

    implementation: Implementation = "auto"

    def __call__(
        self,
        x: jax.Array,
        index: jax.Array,
        score: jax.Array | None,
        routed: Any,
        shared: jax.Array | None = None,
        tape: LinearTape | None = None,
    ) -> jax.Array:
        """One map of every token.

        In the backward pass of the depth scan a tape may be given: then routed and shared get no gradient, and the
        tape's gradient is the tape's new value.

        Args:
            x: [T, a], compute dtype.
            index: int32, the selected expert, [T]; or [], one for all.
            score: [T] float32, its sigmoid score; None for 1.
            routed: [G, a, b], compute dtype; or `arrange`d, which is for inference.
            shared: [a, b], compute dtype; None where there is none, or once it has been folded into the routed ones.
            tape: see `start_tape`.

        Returns:
            [T, b], compute dtype.
        """
        if shared is None and (index.ndim == 0 or isinstance(routed, OutputRows)):
            product = in_place.linear(x, index, routed)
            return product if score is None else score.astype(x.dtype)[:, None] * product
        score = jnp.ones(x.shape[0], jnp.float32) if score is None else score
        if self._backend(index.size, routed.shape, x.dtype) != "pallas":
            return (cpu if on_cpu() else xla).expert_linear(x, index, score, routed, shared)
        shared = jnp.zeros(routed.shape[1:], routed.dtype) if shared is None else shared  # the kernels always add one
        block = _tiles(x, routed).block
        plan = plan_dispatch(index[:, None], routed.shape[0], block, multiple=target().cores)
        return _expert_linear(x, score, routed, shared, plan, tape)

    def start_tape(self, tokens: int, routed: tuple[int, ...], dtype: jnp.dtype | str) -> LinearTape | None:
        """The empty tape for the backward pass of a depth scan; None where no kernel runs, and autodiff must do.

        Args:
            tokens: T of each depth.
            routed: shape (G, a, b).
            dtype: compute dtype.
        """
        if self._backend(tokens, routed, jnp.dtype(dtype)) != "pallas":
            return None
        return LinearTape(jnp.zeros(routed, jnp.float32))

    def arrange(self, routed: jax.Array) -> Any:
        """`routed`, [.., a, b], as decoding wants it on this platform."""
        return transposed(routed) if self.implementation != "pallas" and on_cpu() else routed

    def _backend(self, tokens, routed, dtype):
        return backend("attention MoE", self.implementation, lambda: unsupported(tokens, routed, dtype, target()))


@jax.custom_vjp
def _expert_linear(x, score, routed, shared, plan: Dispatch, tape) -> jax.Array:
    return _forward(x, score, routed, shared, plan, tape)[0]


def _forward(x, score, routed, shared, plan, tape):
    tile = _tiles(x, routed).outputs
    product = tpu.forward(_flat(blocks_of(x, plan)), routed, shared, plan, tile=tile, target=target())
    return score.astype(x.dtype)[:, None] * _of_token(product, plan), (x, score, routed, shared, plan, tape)


def _backward(residuals, d_out):
    x, score, routed, shared, plan, tape = residuals
    chosen, chip = _tiles(x, routed), target()
    rows, d_rows = _flat(blocks_of(x, plan)), _flat(blocks_of(d_out, plan))
    d_x, d_score = tpu.input_gradient(d_rows, rows, routed, shared, plan, tile=chosen.inputs, target=chip)
    slot_scores = jnp.append(score, 0.0).at[plan.source.reshape(-1)].get(mode="promise_in_bounds")
    totals = jnp.zeros(routed.shape, jnp.float32) if tape is None else tape.totals
    totals = accumulate(
        [totals[:, None]],
        (slot_scores.astype(x.dtype)[:, None] * rows)[None],
        [d_rows],
        visits_of(plan.num_blocks[None], plan.source.shape[0]),
        block=chosen.block,
        tile=chosen.columns,
        target=chip,
    )
    d_routed = totals[0][:, 0]
    d_x = score.astype(x.dtype)[:, None] * _of_token(d_x, plan)
    d_score = _of_token(d_score.reshape(-1), plan).astype(score.dtype)
    if tape is not None:
        return d_x, d_score, None, None, None, LinearTape(d_routed)
    return d_x, d_score, d_routed.astype(routed.dtype), jnp.sum(d_routed, axis=0).astype(shared.dtype), None, None


_expert_linear.defvjp(_forward, _backward)


def _of_token(rows, plan):
    return rows.at[plan.slot[:, 0]].get(mode="promise_in_bounds")


def _flat(blocks):
    return blocks.reshape(-1, blocks.shape[-1])


def _tiles(x, routed) -> Tiles:
    chosen = Tiles.of(x.shape[0], routed.shape, x.dtype, target())
    assert chosen is not None  # `unsupported` has been asked
    return chosen
