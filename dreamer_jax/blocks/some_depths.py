"""A dimension of the mixture at certain depths only (section 5): at depth 0 and every n-th depth from there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import NOWHERE, Context
from dreamer_jax.blocks.positions import Depth


def acting(depths: Any, every: int) -> Any:
    """Of so many depths from 0, at how many a dimension acts: a number or an array."""
    return depths if every == 1 else -(-depths // every)


def place(depth: Depth, every: int) -> Depth:
    """Where a dimension keeps what a depth leaves: only depths at which it acts have a place. That of another depth is
    the next one's, which is filled before anything looks at it."""
    return depth if every == 1 else Depth(acting(depth.index, every), acting(depth.total, every))


def at_some_depths(
    attention: Any,
    x: jax.Array,
    depth: Depth,
    memory: Any,
    bias: Any,
    context: Context,
    tape: dict[str, Any] | None,
) -> Any:
    """What the attention returns at depths that `attention.every` divides; elsewhere zeros, and the memory as it was.

    With one depth for all, nothing is computed where nothing is added. The backward pass keeps the arguments alone and
    computes the attention again: a branch that may be taken keeps what it needs whether it is taken or not, its weights
    and memory among that.

    Args:
        attention: a bound module with `every`, such as `SequenceAttention`; its arguments follow.
        x: [B, P, h], normed.
        depth: of the positions: one for all, or in decoding [B, P].
        memory, bias, context, tape: as of the attention.
    """
    module, variables = attention.unbind()
    if depth.index.ndim:
        return _position_by_position(module, variables, x, depth, memory, bias, context, tape)

    def acts(x, variables, memory, bias, context, tape):
        return module.apply(variables, x, depth, memory, bias, context, tape)

    def rests(x, variables, memory, bias, context, tape):
        shapes = jax.eval_shape(acts, x, variables, memory, bias, context, tape)
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return nothing._replace(out=_passing_on(nothing.out, tape), memory=memory)

    def either(*arguments):
        return jax.lax.cond(jax.lax.rem(depth.index, module.every) == 0, acts, rests, *arguments)

    return jax.checkpoint(either, prevent_cse=False)(x, variables, memory, bias, context, tape)


def _position_by_position(module, variables, x, depth, memory, bias, context, tape):
    """All are computed; of those whose depth isn't one of the attention's, nothing is taken and nothing stays."""
    acts = depth.index % module.every == 0  # [B, P]
    context = context._replace(
        positions=jnp.where(acts, context.positions, NOWHERE),
        segment_ids=jnp.where(acts, context.segment_ids, 0),
    )
    its: Any = module.apply(variables, x, depth, memory, bias, context, tape)
    its = its._replace(out=jnp.where(acts[..., None], its.out, 0))
    if isinstance(its.memory, jax.Array):  # a state of the depths so far
        its = its._replace(memory=jnp.where(acts.reshape(*acts.shape, *[1] * (memory.ndim - 2)), its.memory, memory))
    return its


@jax.custom_vjp
def _passing_on(out: jax.Array, tape: Any) -> jax.Array:
    """`out`; in the backward pass the tape goes on as it is, in the place of its gradient."""
    del tape
    return out


def _forward(out, tape):
    return out, tape


def _backward(tape, d_out):
    return d_out, tape


_passing_on.defvjp(_forward, _backward)
