"""A dimension of the mixture at certain depths only (section 5): at depth 0 and every n-th depth from there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    watched: bool = False,
) -> Any:
    """What the attention returns at depths that `attention.every` divides; elsewhere zeros, and the memory as it was.

    With one depth for all, nothing is computed where nothing is added. The backward pass keeps the arguments alone and
    computes the attention again: jax would have a branch that may be taken hand over all that its reverse pass reads,
    weights and memory among that, whether it was taken or not.

    Args:
        attention: a bound module with `every`, such as `SequenceAttention`; its arguments follow.
        x: [B, P, h], normed.
        depth: of the positions: one for all, or in decoding [B, P].
        memory, bias, context, tape: as of the attention.
        watched: whether what is inside of the attention is captured; then it is computed at every depth.
    """
    if depth.index.ndim or watched:
        return _position_by_position(attention, x, depth, memory, bias, context, tape)
    module, variables = attention.unbind()
    # Where a tape has the gradient of what depths have left, as of `DepthCache`, that gets none here.
    apart = tape is not None and "keys" in tape
    return _either(module, apart, (variables, x, memory, tape), depth, bias, context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _either(module: Any, apart: bool, arguments: Any, depth: Depth, bias: Any, context: Context) -> Any:
    """The attention, or nothing."""

    def acts(arguments):
        variables, x, memory, tape = arguments
        return module.apply(variables, x, depth, memory, bias, context, tape)

    def rests(arguments):
        shapes = jax.eval_shape(acts, arguments)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)._replace(memory=arguments[2])

    return jax.lax.cond(_acts(module, depth), acts, rests, arguments)


def _forward(module, apart, arguments, depth, bias, context):
    return _either(module, apart, arguments, depth, bias, context), (arguments, depth, bias, context)


def _backward(module, apart, residuals, d_its):
    (variables, x, memory, tape), depth, bias, context = residuals

    def attend(variables, x, memory, tape):
        its: Any = module.apply(variables, x, depth, memory, bias, context, tape)
        return its.out, () if apart else its.memory

    def acts(d_out, d_memory, tape):
        if not apart:
            return jax.vjp(attend, variables, x, memory, tape)[1]((d_out, d_memory))
        pull = jax.vjp(lambda variables, x, tape: attend(variables, x, memory, tape), variables, x, tape)[1]
        d_variables, d_x, tape = pull((d_out, ()))
        return d_variables, d_x, (), tape

    def rests(d_out, d_memory, tape):  # in the place of its gradient the tape goes on as it is
        return *jax.tree.map(jnp.zeros_like, (variables, x)), d_memory, tape

    d_memory = () if apart else d_its.memory
    d_variables, d_x, d_memory, tape = jax.lax.cond(_acts(module, depth), acts, rests, d_its.out, d_memory, tape)
    return (d_variables, d_x, None if apart else d_memory, tape), None, None, None


_either.defvjp(_forward, _backward)


def _acts(module: Any, depth: Depth) -> jax.Array:
    index = jnp.asarray(depth.index)
    return jax.lax.rem(index, jnp.asarray(module.every, index.dtype)) == 0


def _position_by_position(attention, x, depth, memory, bias, context, tape):
    """All are computed; of those whose depth isn't one of the attention's, nothing is taken and nothing stays."""
    acts = _acts(attention, depth)  # [B, P], or one for all
    context = context._replace(
        positions=jnp.where(acts, context.positions, NOWHERE),
        segment_ids=jnp.where(acts, context.segment_ids, 0),
    )
    its: Any = attention(x, depth, memory, bias, context, tape)
    its = its._replace(out=jnp.where(acts[..., None], its.out, 0))
    if isinstance(its.memory, jax.Array):  # a state of the depths so far
        its = its._replace(memory=jnp.where(acts.reshape(*acts.shape, *[1] * (memory.ndim - 2)), its.memory, memory))
    return its


def branch_at_some_depths(block: Any, x: jax.Array, depth: Depth, context: Context) -> tuple[jax.Array, Any]:
    """The same of a block without a memory: what it returns, or zeros.

    Args:
        block: a bound module with `every`, called and returning as `ParameterAttention` does.
        x, depth, context: as of `at_some_depths`.
    """
    its = at_some_depths(_Memoryless(block), x, depth, (), None, context, None)
    return its.out, its.seen


class _Read(NamedTuple):
    """What an attention returns that has nothing else to return."""

    out: jax.Array
    seen: Any
    memory: tuple[()] = ()


@dataclass(frozen=True)
class _Memoryless:
    """A block that is called as an attention is."""

    block: Any

    @property
    def every(self) -> int:
        """As of the block."""
        return self.block.every

    def unbind(self) -> tuple[_Memoryless, Any]:
        """Without its weights, and they."""
        block, variables = self.block.unbind()
        return _Memoryless(block), variables

    def apply(
        self, variables: Any, x: jax.Array, depth: Depth, memory: Any, bias: Any, context: Context, _: Any
    ) -> _Read:
        """As of a module."""
        return _Read(*self.block.apply(variables, x, depth, context.real))

    def __call__(self, x: jax.Array, depth: Depth, memory: Any, bias: Any, context: Context, _: Any) -> _Read:
        """As of one that is bound."""
        return _Read(*self.block(x, depth, context.real))
