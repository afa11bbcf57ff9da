"""What a depth keeps for the backward pass of the depth scan, and how it is differentiated from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Remat
from dreamer_jax.recurrence import tape as tapes
from dreamer_jax.recurrence.weights import Weights
from pallas_kernels.kept import KEPT

PyTree = Any
Pullback = Callable[[list[jax.Array], list[jax.Array]], tuple[Weights, list[jax.Array], list[jax.Array], PyTree]]
"""(d_state, d_outputs) -> (d_weights, d_state, d_inputs, tape); of state, outputs and inputs the floating leaves."""


def floats_of(tree: PyTree) -> list[jax.Array]:
    """The floating leaves of a tree, which have gradients, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _replaced(tree: PyTree, floats: list[jax.Array]) -> PyTree:
    """The tree with other floating leaves."""
    given = iter(floats)
    return jax.tree.map(lambda leaf: next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, tree)


def _with_taped(own: Weights, taped: PyTree) -> Weights:
    return own.replace(shared=tapes.merged(own.shared, taped))


class Recompute:
    """Keeps the state alone, and computes the step again."""

    def __init__(self, step: Callable[..., Any], remat: Remat):
        self._step = step

    def run(self, own, tape, state, inputs, depth, memory, context):
        """(what the step returns, what is kept of it)."""
        return self._step(own, state, inputs, depth, memory, context), state

    def pullback(self, own, taped, kept, inputs, depth, memory, context, tape) -> Pullback:
        """From what was kept of this depth; `own` are its weights less those whose gradients are on the tape."""

        def again(own, state, floats, tape):
            args = (_with_taped(own, taped), _replaced(kept, state), _replaced(inputs, floats))
            stepped = self._step(*args, depth, memory, context, tape=tape)
            return floats_of(stepped.state), floats_of(stepped.outputs)

        vjp = jax.vjp(again, own, floats_of(kept), floats_of(inputs), tape)[1]
        return lambda d_state, d_outputs: vjp((d_state, d_outputs))


class Record:
    """Runs the step under jax.vjp and keeps what its reverse pass asks for."""

    def __init__(self, step: Callable[..., Any], remat: Remat):
        self._step, self._remat = step, remat
        self._record: Any = None
        """How to put the kept leaves together again; the same at every depth."""

    def run(self, own, tape, state, inputs, depth, memory, context):
        """(what the step returns, what is kept of it)."""
        taped = tapes.part_of(own.shared, tapes.gradients(tape))
        rest = own.replace(shared=tapes.without(own.shared, taped))

        def record(own, floats, input_floats, tape):
            args = (_with_taped(own, taped), _replaced(state, floats), _replaced(inputs, input_floats))
            stepped = self._step(*args, depth, memory, context, tape=tape)
            return (floats_of(stepped.state), floats_of(stepped.outputs)), stepped

        if self._remat == "attention":
            policy = jax.checkpoint_policies.save_only_these_names(KEPT)
            record = jax.checkpoint(record, policy=policy, prevent_cse=False)
        (new_state, outputs), vjp, stepped = jax.vjp(
            record, rest, floats_of(state), floats_of(inputs), tape, has_aux=True
        )
        stepped = stepped._replace(
            state=_replaced(stepped.state, new_state), outputs=_replaced(stepped.outputs, outputs)
        )
        given = (own, depth, (memory, stepped.memory), inputs, context, tape)
        self._record, kept = _take_apart(vjp, given)
        return stepped, kept

    def pullback(self, own, taped, kept, inputs, depth, memory, context, tape) -> Pullback:
        """As of `Recompute`."""
        given = (_with_taped(own, taped), depth, (memory, memory), inputs, context, tape)
        vjp = _put_together(self._record, given, kept)
        return lambda d_state, d_outputs: vjp((d_state, d_outputs))


def _take_apart(vjp: Any, given: PyTree) -> tuple[Any, list[jax.Array]]:
    """A function of jax.vjp as (how to put it together again, the arrays to keep): less those that are `given`."""
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(given))}
    leaves, structure = jax.tree.flatten(vjp)
    sources = [places.get(id(leaf)) for leaf in leaves]
    return (structure, sources), [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]


def _put_together(record: Any, given: PyTree, kept: list[jax.Array]) -> Any:
    """The inverse of `_take_apart`, with other arrays of the same structure given."""
    structure, sources = record
    arrays, rest = jax.tree.leaves(given), iter(kept)
    return jax.tree.unflatten(structure, [next(rest) if place is None else arrays[place] for place in sources])
