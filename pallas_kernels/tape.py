"""What an operation hands down the depths during the backward pass of the depth scan (dreamer_jax/recurrence)."""

from __future__ import annotations

from typing import Any

import jax


class Tape:
    """One operation's part of the tape: a pytree whose leaves are all floating, so that it can be a gradient.

    An operation that is given its tape returns, in the place of the tape's gradient, the tape's new value. What else
    the scan needs to know of a tape is here; an operation's own tape says what differs.

    Attributes:
        every: depths between two calls of `settle`.
    """

    @property
    def every(self) -> int:
        """See the class."""
        return 1

    def settle(self) -> Any:
        """The tape with what was kept aside for several depths worked in."""
        return self

    def gradients(self) -> dict[str, Any]:
        """Gradients of weights that are on the tape, float32, by name, in the module that the operation belongs to."""
        return {}


class Tapes(Tape):
    """Several tapes as one: a pytree whose children are tapes, or trees of them."""

    @property
    def every(self) -> int:
        """As often as any of them needs it."""
        return depths_between(self)

    def settle(self) -> Any:
        """Each of them settled."""
        return jax.tree.map(lambda part: part.settle(), self, is_leaf=lambda part: _is_other_tape(part, self))


def depths_between(tree: Any) -> int:
    """Depths between two calls of `settle` of the tapes in a tree: as many as each of those has room for that keep
    anything aside."""
    parts = jax.tree.leaves(tree, is_leaf=lambda part: _is_other_tape(part, tree))
    return min((part.every for part in parts if part.every > 1), default=1)


def _is_other_tape(part: Any, whole: Any) -> bool:
    return isinstance(part, Tape) and part is not whole
