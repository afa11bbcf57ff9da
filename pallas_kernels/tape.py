"""What an operation hands down the depths during the backward pass of the depth scan (dreamer_jax/recurrence)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


class Tape:
    """One operation's part of the tape: a pytree whose leaves are all floating, so that it can be a gradient.

    An operation that is given its tape returns, in the place of the tape's gradient, the tape's new value. What else
    the scan needs to know of a tape is here; an operation's own tape says what differs.
    """

    def make_room(self) -> Any:
        """The tape with room for what one more depth may keep aside; before every depth."""
        return self

    def settle(self) -> Any:
        """The tape with what was kept aside for several depths worked in; after the last depth."""
        return self

    def gradients(self) -> dict[str, Any]:
        """Gradients of weights that are on the tape, float32, by name, in the module that the operation belongs to."""
        return {}


class Tapes(Tape):
    """Several tapes as one: a pytree whose children are tapes, or trees of them."""

    def make_room(self) -> Any:
        """In each of them."""
        return self._each(lambda part: part.make_room())

    def settle(self) -> Any:
        """Each of them settled."""
        return self._each(lambda part: part.settle())

    def _each(self, change: Callable[[Any], Any]) -> Any:
        return jax.tree.map(change, self, is_leaf=lambda part: isinstance(part, Tape) and part is not self)
