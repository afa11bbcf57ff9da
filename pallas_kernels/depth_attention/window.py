"""Which of its own depths a token sees: the newest few, or every second, or both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """At depth l the newest w of the depths l, l - s, l - 2 s, ...; depth l itself is always one of them.

    Attributes:
        size: w, 0 for as many as there are.
        dilation: s.
    """

    size: int = 0
    dilation: int = 1

    @property
    def whole(self) -> bool:
        """Whether every depth is seen."""
        return self == WHOLE

    def of(self, slots: int) -> Window:
        """The same for a pass of L = `slots` depths: `WHOLE` where nothing of it is left out."""
        return WHOLE if self.dilation == 1 and self.most(slots) == slots else self

    def most(self, slots: int) -> int:
        """Depths that one of L = `slots` depths sees at most."""
        seen = -(-slots // self.dilation)
        return min(self.size, seen) if self.size else seen

    def span(self, slots: int) -> int:
        """Depths from the newest that is seen to the oldest, both included: what has to be kept in a pass of L =
        `slots` depths, since what is older is never looked at again."""
        return (self.most(slots) - 1) * self.dilation + 1

    def mean(self, slots: int) -> float:
        """Depths that are seen on average over a pass of L = `slots` depths."""
        most = self.most(slots)
        return sum(min(most, depth // self.dilation + 1) for depth in range(slots)) / slots


WHOLE = Window()
