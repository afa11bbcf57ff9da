"""Typed entry of the attention MoE's linear map, and its custom VJP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Implementation
from pallas_kernels import backend as backends
from pallas_kernels import gpu
from pallas_kernels.attention_moe import cpu, in_place, tpu, tpu_int8, xla
from pallas_kernels.attention_moe.shapes import Tiles, depths_aside, unsupported
from pallas_kernels.attention_moe.tape import LinearTape
from pallas_kernels.backend import target
from pallas_kernels.dispatch import few, grouped, triton
from pallas_kernels.dispatch.api import Dispatch, blocks_of, filled_blocks_of, plan_blocks, plan_dispatch
from pallas_kernels.dispatch.aside import blocks_aside
from pallas_kernels.weights import Arranged, OutputColumns, OutputRows


@dataclass(frozen=True)
class ExpertLinear:
    """The selected linear expert plus the shared one: s x W_e + stop_gradient(s) x W_shared (Eq. 7).

    Computed forward as one product, s x (W_e + W_shared) (Eq. 8), with Eq. 7's gradient: the score doesn't see
    the shared expert, which is what differentiating Eq. 8 would get wrong.

    Attributes:
        implementation: see `pallas_kernels.backend`.
        gradient_depths: depths whose rows the tape keeps aside and adds to the totals in one pass, at most; 1 adds at
            every depth and keeps none. 0 chooses, see `shapes.depths_aside`.
        total_depth: L, for that choice.
        int8: decoding keeps whole numbers of eight bits, see `OutputRows`: on a CPU, on a GPU where kernels take
            them, and on a TPU whose kernel is faster with them.
    """

    implementation: Implementation = "auto"
    gradient_depths: int = 1
    total_depth: int = 1
    int8: bool = False

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
        if shared is None and tape is None and self._takes_few(x, routed):
            form: Any = few.product if isinstance(routed, Arranged) else _few
            product = form(x, index.reshape(-1), routed)
            return product if score is None else score.astype(x.dtype)[:, None] * product
        if shared is None and (index.ndim == 0 or isinstance(routed, Arranged)):
            int8 = isinstance(routed, OutputColumns)
            product = self._from_int8(x, index, routed) if int8 else in_place.linear(x, index, routed)
            return product if score is None else score.astype(x.dtype)[:, None] * product
        score = jnp.ones(x.shape[0], jnp.float32) if score is None else score
        chosen = self._backend(index.size, routed.shape, x.dtype)
        if chosen != "pallas":
            if chosen == "cpu":
                return cpu.expert_linear(x, index, score, routed, shared)
            products = triton.TRITON if chosen == "gpu" else grouped.XLA
            return xla.expert_linear(x, index, score, routed, shared, tape, products)
        shared = jnp.zeros(routed.shape[1:], routed.dtype) if shared is None else shared  # the kernels always add one
        block = _tiles(x.shape[0], routed.shape, x.dtype).block
        plan = plan_dispatch(index[:, None], routed.shape[0], block, multiple=target().cores)
        return _expert_linear(x, score, routed, shared, plan, tape)

    def start_tape(self, tokens: int, routed: tuple[int, ...], dtype: jnp.dtype | str) -> LinearTape | None:
        """The empty tape for the backward pass of a depth scan; None where no kernel runs, and autodiff must do.

        Args:
            tokens: T of each depth.
            routed: shape (G, a, b).
            dtype: compute dtype.
        """
        dtype = jnp.dtype(dtype)
        form = self._backend(tokens, routed, dtype)
        if form == "gpu":
            return LinearTape(jnp.zeros(routed, jnp.float32))
        if form != "pallas":
            return None
        chosen = _tiles(tokens, routed, dtype)
        most = plan_blocks(tokens, routed[0], chosen.block, multiple=target().cores)
        rows = most * chosen.block
        depths = depths_aside(self.gradient_depths, tokens, rows, routed, dtype, self.total_depth, target())
        blocks = blocks_aside(depths, most, tokens, routed[0], chosen.block)
        return LinearTape.empty(routed, chosen, depths, most, blocks, dtype)

    def arrange(self, routed: jax.Array, expert: bool = True) -> Any:
        """`routed`, [.., a, b], as decoding wants it on this platform; or matrices that are of no `expert`, but of the
        layers of several depths."""
        int8 = self.int8 and expert
        if backends.in_place(self.implementation):
            return (OutputRows.in_int8 if int8 else OutputRows.of)(jnp.swapaxes(routed, -1, -2))
        form = self._backend(1, routed.shape[-3:], routed.dtype) if int8 else None
        if form == "gpu" or (form == "pallas" and target().int8):
            return OutputColumns.in_int8(routed)
        return routed

    def _from_int8(self, x, index, routed):
        """x times the matrix of each row's expert, `arrange`d; where rows are too many for the kernel, as an array."""
        if self._backend(index.size, routed.shape, x.dtype) != "pallas":
            return self(x, index, None, routed.as_array(x.dtype))
        index = jnp.broadcast_to(index, x.shape[:1])
        its = _tiles(x.shape[0], routed.shape, x.dtype)
        plan = plan_dispatch(index[:, None], routed.shape[0], its.block, multiple=target().cores)
        product = tpu_int8.forward(_flat(blocks_of(x, plan)), routed, plan, tile=its.outputs, target=target())
        return _of_token(product, plan)

    def _takes_few(self, x, routed):
        """Whether rows are taken one by one, on a GPU, whose kernel has no matrices with outputs as rows."""
        if isinstance(routed, OutputRows) or not backends.on_gpu():
            return False
        if self._backend(x.shape[0], routed.shape, x.dtype) != "gpu":
            return False
        return few.few(x.shape[0], routed)

    def _backend(self, tokens, routed, dtype):
        return backends.backend(
            "attention MoE",
            self.implementation,
            lambda: unsupported(tokens, routed, dtype, target()),
            lambda: triton.unsupported(tokens, routed, dtype),
        )


def _in_blocks(x, index, routed):
    index = jnp.broadcast_to(index, x.shape[:1])
    return xla.expert_linear(x, index, jnp.ones(x.shape[0]), routed, None, products=triton.TRITON)


_few = gpu.unless_differentiated(lambda x, index, routed: few.product(x, index, routed), _in_blocks)


@jax.custom_vjp
def _expert_linear(x, score, routed, shared, plan: Dispatch, tape) -> jax.Array:
    return _forward(x, score, routed, shared, plan, tape)[0]


def _forward(x, score, routed, shared, plan, tape):
    tile = _tiles(x.shape[0], routed.shape, x.dtype).outputs
    product = tpu.forward(_flat(blocks_of(x, plan)), routed, shared, plan, tile=tile, target=target())
    return score.astype(x.dtype)[:, None] * _of_token(product, plan), (x, score, routed, shared, plan, tape)


def _backward(residuals, d_out):
    x, score, routed, shared, plan, tape = residuals
    chosen, chip = _tiles(x.shape[0], routed.shape, x.dtype), target()
    aside = tape.rows if tape is not None else None
    first = 0
    rows = _flat(blocks_of(x, plan))
    if tape is None or aside is None:
        d_rows = _flat(blocks_of(d_out, plan))
    else:  # the rows are fetched to where they are kept
        first = tape.first_block
        d_rows = filled_blocks_of(d_out, plan, aside.d_out, first)
    d_x, d_score = tpu.input_gradient(d_rows, rows, routed, shared, plan, first, tile=chosen.inputs, target=chip)
    slot_scores = jnp.append(score, 0.0).at[plan.source.reshape(-1)].get(mode="promise_in_bounds")
    weighted = slot_scores.astype(x.dtype)[:, None] * rows
    d_x = score.astype(x.dtype)[:, None] * _of_token(d_x, plan)
    d_score = _of_token(d_score.reshape(-1), plan).astype(score.dtype)
    if tape is not None and aside is not None:
        weighted = jax.lax.dynamic_update_slice_in_dim(aside.x, weighted, first * plan.source.shape[1], 0)
        return d_x, d_score, None, None, None, tape.keep(weighted, d_rows, plan.num_blocks)
    totals = tape or LinearTape.empty(routed.shape, chosen, 1, 0, 0, x.dtype)
    totals = totals.add(weighted, d_rows, plan.num_blocks[None], chip)
    if tape is not None:
        return d_x, d_score, None, None, None, totals
    d_routed = totals.totals
    return d_x, d_score, d_routed.astype(routed.dtype), jnp.sum(d_routed, axis=0).astype(shared.dtype), None, None


_expert_linear.defvjp(_forward, _backward)


def _of_token(rows, plan):
    return rows.at[plan.slot[:, 0]].get(mode="promise_in_bounds")


def _flat(blocks):
    return blocks.reshape(-1, blocks.shape[-1])


def _tiles(tokens, routed, dtype) -> Tiles:
    chosen = Tiles.of(tokens, routed, dtype, target())
    assert chosen is not None  # `unsupported` has been asked
    return chosen
