"""Typed entry of the expert MLP, its custom VJP, and its tape."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Implementation
from pallas_kernels import backend as backends
from pallas_kernels import gpu
from pallas_kernels.backend import target
from pallas_kernels.dispatch import few, grouped, triton
from pallas_kernels.dispatch.api import Dispatch, filled_blocks_of, plan_blocks, plan_dispatch
from pallas_kernels.dispatch.aside import blocks_aside
from pallas_kernels.expert_mlp import cpu, in_place, tpu, tpu_int8, xla
from pallas_kernels.expert_mlp.shapes import Tiles, depths_aside, unsupported
from pallas_kernels.expert_mlp.tape import ExpertTape
from pallas_kernels.kept import keep
from pallas_kernels.weights import OutputColumns, OutputRows, Stacked


@dataclass(frozen=True)
class ExpertMLP:
    """Sum of the selected experts' SwiGLU outputs, weighted: sum_j w_j W_down(silu(W_gate x) * (W_up x)).

    Dropless and deterministic.

    Attributes:
        implementation: see `pallas_kernels.backend`.
        gradient_depths: depths whose rows the tape keeps aside and adds to the totals in one pass; 1 adds at every
            depth and keeps none. A depth kept costs about (3F + 2h) T k elements of memory and saves
            24 E F h (1 - 1 / gradient_depths) bytes of traffic. 0 chooses, see `shapes.depths_aside`.
        total_depth: L, for that choice.
        recompute: the kernels keep neither gate nor up for the backward pass, which computes them again from the rows
            that it fetches in any case.
        int8: decoding keeps whole numbers of eight bits, see `OutputRows`: on a CPU, on a GPU where kernels take
            them, and on a TPU whose kernel is faster with them.
    """

    implementation: Implementation = "auto"
    gradient_depths: int = 1
    total_depth: int = 1
    recompute: bool = False
    int8: bool = False

    def __call__(
        self,
        x: jax.Array,
        indices: jax.Array,
        weights: jax.Array,
        gate_up: Any,
        down: Any,
        tape: ExpertTape | None = None,
    ) -> jax.Array:
        """What the experts make of tokens.

        Differentiable in x, weights, gate_up and down. In the backward pass of the depth scan a tape may be given: then
        gate_up and down get no gradient, and the tape's gradient is the tape's new value.

        Args:
            x: [T, h], compute dtype.
            indices: [T, k] int32, selected experts, different within a token. E stands for no expert here: the pair
                adds nothing, gets no gradient and takes no block (expert parallelism: it is another device's).
            weights: [T, k] float32.
            gate_up: [E, 2F, h], W_gate's F rows, then W_up's; compute dtype.
            down: [E, F, h], compute dtype. Both may be `arrange`d, which is for inference.
            tape: see `start_tape`.

        gate_up and down may be `Stacked`: then each depth has E experts of its own.

        Returns:
            [T, h], compute dtype.
        """
        among = None
        if isinstance(gate_up, Stacked):
            among, (indices, gate_up, down) = _one_row(indices, gate_up, down)
        if isinstance(gate_up, OutputRows) and backends.in_place(self.implementation):
            return in_place.expert_mlp(x, indices, weights, gate_up, down, among)
        chosen = self._backend(indices.shape, gate_up.shape, x.dtype)
        if chosen == "gpu" and tape is None and few.few(indices.size, gate_up, among):
            form = _few_rows if isinstance(gate_up, OutputRows) else _few
            return form(x, indices, weights, gate_up, down)
        if chosen != "pallas":
            if isinstance(gate_up, OutputRows):
                gate_up, down = gate_up.as_array(x.dtype), down.as_array(x.dtype)
            if chosen == "cpu":
                return cpu.expert_mlp(x, indices, weights, gate_up, down)
            return xla.expert_mlp(x, indices, weights, gate_up, down, tape, _products(chosen))
        experts = gate_up.shape[0]
        block = _tiles(indices.size, gate_up.shape, x.dtype).block
        plan = plan_dispatch(indices, experts, block, multiple=target().cores)
        # A pair without an expert has a padding slot: weighted by nothing, it adds nothing, with zero gradients.
        weights = jnp.where(indices < experts, weights, 0)
        if isinstance(gate_up, OutputRows):
            values = tpu_int8.forward(filled_blocks_of(x, plan), gate_up, down, plan, target=target())
            return _combine(values, plan, weights).astype(x.dtype)
        return _expert_mlp(x, weights, gate_up, down, plan, tape, self.recompute)

    def start_tape(
        self, indices: tuple[int, ...], gate_up: tuple[int, ...], dtype: jnp.dtype | str, group: int = 1
    ) -> ExpertTape | None:
        """The empty tape for the backward pass of a depth scan; None where no kernel runs, and autodiff must do.

        Args:
            indices: shape (T, k) of the selection at each depth.
            gate_up: shape (E, 2F, h).
            dtype: compute dtype.
            group: devices that have the experts between them; of the pairs each has as many as the others if all
                experts are balanced.
        """
        dtype = jnp.dtype(dtype)
        chosen_form = self._backend(indices, gate_up, dtype)
        if chosen_form == "gpu":
            return ExpertTape.of_totals(gate_up)
        if chosen_form != "pallas":
            return None
        pairs, experts = indices[0] * indices[1], gate_up[0]
        chosen = _tiles(pairs, gate_up, dtype)
        most = plan_blocks(pairs, experts, chosen.block, multiple=target().cores)
        sizes = gate_up[1] // 2, gate_up[2]
        depths = self.gradient_depths or depths_aside(most * chosen.block, *sizes, dtype, self.total_depth, target())
        blocks = blocks_aside(depths, most, pairs / group, experts, chosen.block)
        return ExpertTape.empty(gate_up, chosen, depths, most, blocks, dtype)

    def arrange(self, gate_up: jax.Array, down: jax.Array) -> tuple[Any, Any]:
        """Both, [.., E, 2F, h] and [.., E, F, h], as decoding wants them on this platform."""
        if backends.in_place(self.implementation):
            form = OutputRows.in_int8 if self.int8 else OutputRows.of
            return form(gate_up), form(jnp.swapaxes(down, -1, -2))
        form = self._backend((1, 1), gate_up.shape[-3:], gate_up.dtype) if self.int8 else None
        if form == "gpu" or (form == "pallas" and target().int8):
            return OutputRows.in_int8(gate_up), OutputColumns.in_int8(down)
        return gate_up, down

    def _backend(self, indices, gate_up, dtype):
        return backends.backend(
            "expert MLP",
            self.implementation,
            lambda: unsupported(indices, gate_up, dtype, target()),
            lambda: _unsupported_on_gpu(math.prod(indices), gate_up, dtype),
        )


def _unsupported_on_gpu(pairs: int, gate_up: tuple[int, ...], dtype: Any) -> str | None:
    experts, doubled, hidden = gate_up
    sides = doubled, doubled // 2
    return next(filter(None, (triton.unsupported(pairs, (experts, side, hidden), dtype) for side in sides)), None)


def _few_rows(x, indices, weights, gate_up, down):
    """The definition, by kernels for few rows."""
    activation = few.swiglu(x, indices, gate_up)  # [T k, F]
    values = few.product(activation, indices.reshape(-1), down, jnp.float32).reshape(*indices.shape, -1)
    return jnp.sum(values * jnp.where(indices < gate_up.shape[0], weights, 0)[..., None], axis=1).astype(x.dtype)


_few = gpu.unless_differentiated(_few_rows, functools.partial(xla.expert_mlp, products=triton.TRITON))


def _products(form: str) -> grouped.Products:
    return triton.TRITON if form == "gpu" else grouped.XLA


def _one_row(
    indices: jax.Array, gate_up: Stacked, down: Stacked
) -> tuple[int | None, tuple[jax.Array, jax.Array, Any]]:
    """Stacked experts as N E of them in a row: how many tokens choose among, then indices there, gate_up, down."""
    stacks, experts = gate_up.values.shape[:2]
    row = gate_up.row[:, None] if gate_up.row.ndim else gate_up.row
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (gate_up.values, down.values))
    return None if gate_up.row.ndim else experts, (
        jnp.where(indices < experts, row * experts + indices, stacks * experts),
        *flat,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _expert_mlp(x, weights, gate_up, down, plan: Dispatch, tape, recompute):
    del tape, recompute
    values = tpu.forward(filled_blocks_of(x, plan), gate_up, down, plan, keep=False, target=target())[0]
    return _combine(values, plan, weights).astype(x.dtype)


def _forward(x, weights, gate_up, down, plan, tape, recompute):
    rows = filled_blocks_of(x, plan)
    values, *kept = tpu.forward(rows, gate_up, down, plan, keep=not recompute, target=target())
    gate_and_up = None if recompute else keep(kept[0])
    out = _combine(values, plan, weights).astype(x.dtype)
    return out, (x, weights, gate_up, down, plan, gate_and_up, tape)


def _backward(recompute, residuals, d_out):
    x, weights, gate_up, down, plan, gate_and_up, tape = residuals
    slot_weights = jnp.append(weights.reshape(-1), 0.0).at[plan.source].get(mode="promise_in_bounds")
    aside = tape.rows if tape is not None else None
    first, places = 0, (None, None, None)
    if tape is not None and aside is not None:  # the rows are fetched to where they are kept
        first, places = tape.first_block, aside[:3]
    x_rows, d_rows = filled_blocks_of(x, plan, places[1], first), filled_blocks_of(d_out, plan, places[2], first)
    d_x_rows, d_slot_weights, factors = tpu.input_gradient(
        d_rows,
        x_rows if recompute else gate_and_up,
        slot_weights,
        gate_up,
        down,
        plan,
        places[0],
        first,
        target=target(),
    )
    d_x = _combine(d_x_rows, plan, None).astype(x.dtype)
    d_weights = d_slot_weights.reshape(-1).at[plan.slot].get(mode="promise_in_bounds").astype(weights.dtype)
    if tape is not None and aside is not None:
        return d_x, d_weights, None, None, None, tape.keep(factors, x_rows, d_rows, plan.num_blocks)
    totals = tape or ExpertTape.empty(gate_up.shape, _tiles(plan.slot.size, gate_up.shape, x.dtype), 1, 0, 0, x.dtype)
    totals = totals.add(factors, x_rows, d_rows, plan.num_blocks[None], target())
    if tape is not None:
        return d_x, d_weights, None, None, None, totals
    return d_x, d_weights, totals.gate_up.astype(gate_up.dtype), totals.down.astype(down.dtype), None, None


_expert_mlp.defvjp(_forward, _backward)


def _combine(rows, plan, weights):
    """Sum of each token's rows of [N b, h], weighted: [T, h] float32. One choice at a time, for less memory.

    A row that has no weight adds nothing, even if it isn't finite: it is a padding slot's, and holds another token.
    """
    out = jnp.zeros((), jnp.float32)
    for choice in range(plan.slot.shape[1]):
        row = rows.at[plan.slot[:, choice]].get(mode="promise_in_bounds").astype(jnp.float32)
        weight = None if weights is None else weights[:, choice, None]
        out = out + (row if weight is None else jnp.where(weight != 0, row * weight, 0))
    return out


def _tiles(pairs: int, gate_up: tuple[int, ...], dtype: Any) -> Tiles:
    chosen = Tiles.of(pairs, gate_up[0], gate_up[1] // 2, gate_up[2], dtype, target())
    assert chosen is not None  # `unsupported` has been asked
    return chosen
