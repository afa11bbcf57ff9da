"""The tape of a step: its operations' tapes in nested dictionaries, as their modules are nested.

A module's tapes stand in its dictionary under any names, beside the dictionaries of its submodules. Gradients that a
tape holds are named relative to that module, so that they fall into place in a tree of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.tape import Tape

PyTree = Any


def settle(tape: PyTree) -> PyTree:
    """Every operation's tape with what it kept aside worked in."""
    return jax.tree.map(lambda part: part.settle(), tape, is_leaf=_is_tape)


def make_room(tape: PyTree) -> PyTree:
    """Every operation's tape with room for what one more depth may keep aside."""
    return jax.tree.map(lambda part: part.make_room(), tape, is_leaf=_is_tape)


def gradients(tape: PyTree) -> dict[str, Any]:
    """Gradients of the weights that are on the tape: a part of the tree of weights."""
    found: dict[str, Any] = {}
    for name, part in tape.items():
        found = merged(found, part.gradients() if _is_tape(part) else {name: gradients(part)})
    return {name: value for name, value in found.items() if not isinstance(value, Mapping) or value}


def part_of(tree: PyTree, names: PyTree) -> PyTree:
    """The part of a tree of dictionaries that stands where `names` has anything."""
    return {k: part_of(tree[k], v) if isinstance(v, Mapping) else tree[k] for k, v in names.items()}


def without(tree: PyTree, part: PyTree) -> PyTree:
    """A tree of dictionaries less the leaves that stand in `part`."""
    rest = {k: v for k, v in tree.items() if k not in part}
    return rest | {k: without(tree[k], v) for k, v in part.items() if isinstance(v, Mapping)}


def merged(tree: PyTree, part: PyTree) -> PyTree:
    """A tree of dictionaries with the leaves of `part` added."""
    return {**tree, **{k: merged(tree.get(k, {}), v) if isinstance(v, Mapping) else v for k, v in part.items()}}


def _is_tape(part: Any) -> bool:
    return isinstance(part, Tape)
