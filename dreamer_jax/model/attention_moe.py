"""The projections around an attention: plain matrices in LA, a top-1 mixture of linear experts in DR (section 3.7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model.operations import Operations
from dreamer_jax.model.primitives import input_init, output_init
from dreamer_jax.model.routing import Router, select, usage

Tape = Mapping[str, jax.Array] | None
"""Of an attention's two maps, "qkv" and "out", in the backward pass of the depth scan: what `start_tape` makes."""


class Projections(nn.Module):
    """The fused q/k/v projection and the output projection of one attention.

    In DR both are attention MoEs with as many experts as the trained depth, sharing one selection and one score;
    in LA they are plain matrices and `route` returns None.
    """

    config: DreamerConfig
    operations: Operations
    qkv_size: int
    out_size: int

    def setup(self) -> None:
        config = self.config
        hidden = config.hidden_size
        attentions = 3 if config.depth_attention else 2
        experts = (config.depth,) if config.recurrent else ()

        def matrix(name: str, init, shape: tuple[int, ...], axes: tuple[str, ...], *init_args):
            lead_axes = ("attention_expert",) * (len(shape) - len(axes))
            return self.param(name, init(hidden, *init_args, lead_axes + axes), shape, jnp.float32)

        inward, outward = (hidden, self.qkv_size), (self.out_size, hidden)
        depth_args = (config.depth, attentions)
        self.qkv_weight = matrix("qkv", input_init, experts + inward, ("hidden", "heads"))
        self.out_weight = matrix("out", output_init, experts + outward, ("heads", "hidden"), *depth_args)
        if config.recurrent:
            self.router = Router(config, config.depth)
            self.qkv_shared = matrix("qkv_shared", input_init, inward, ("hidden", "heads"))
            self.out_shared = matrix("out_shared", output_init, outward, ("heads", "hidden"), *depth_args)

    def route(self, x, depth, total_depth, bias, real):
        """[T, h] -> ((index [T] int32, score [T] float32), counts [G] int32); (None, None) in LA."""
        if not self.config.recurrent:
            return None, None
        indices, scores = select(self.router(x, depth, total_depth), bias, 1)
        return (indices[:, 0], scores[:, 0]), usage(indices, self.config.depth, real)

    def qkv(self, x: jax.Array, choice: tuple[jax.Array, jax.Array] | None, tape: Tape = None) -> jax.Array:
        """[T, h] -> [T, (n + 2 kv) d]: q's heads, then k's, then v's."""
        return self._project(x, choice, self.qkv_weight, self.qkv_shared if choice else None, tape and tape["qkv"])

    def out(self, x: jax.Array, choice: tuple[jax.Array, jax.Array] | None, tape: Tape = None) -> jax.Array:
        """[T, n d] -> [T, h]."""
        return self._project(x, choice, self.out_weight, self.out_shared if choice else None, tape and tape["out"])

    def _project(self, x, choice, weight, shared, tape):
        if choice is None:
            return x @ weight.astype(x.dtype)
        index, score = choice
        extra = {} if tape is None else {"tape": tape}
        return self.operations.expert_linear(x, index, score, weight.astype(x.dtype), shared.astype(x.dtype), **extra)


def start_tape(operations: Operations, params: Mapping[str, jax.Array], tokens: int, dtype: Any) -> Tape:
    """The empty tape of both maps of one attention, or None where the operation has none.

    Args:
        operations: as of the layer.
        params: the maps' parameters.
        tokens: T of each depth.
        dtype: compute dtype.
    """
    parts = {name: operations.linear_tape(tokens, params[name].shape, dtype) for name in ("qkv", "out")}
    return None if any(part is None for part in parts.values()) else parts


def tape_gradients(tape: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Gradients of the parameters that are on a tape: every expert's, and their sum for the shared one."""
    shared = {f"{name}_shared": jnp.sum(totals, axis=0) for name, totals in tape.items()}
    return {**tape, **shared}
