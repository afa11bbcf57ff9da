"""What an operation hands down the depths during the backward pass of the depth scan (dreamer_jax/recurrence)."""

from __future__ import annotations

from typing import Any


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
