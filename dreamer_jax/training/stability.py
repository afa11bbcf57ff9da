"""Counting the steps that were skipped because their loss or gradient wasn't finite."""

from __future__ import annotations

from collections import deque
from typing import Any

LAG = 2
"""Steps that may run before their result is looked at, so that looking never waits for the device."""


class Unstable(Exception):
    """Too many steps in a row were skipped.

    Attributes:
        step: the last of them.
    """

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


class SkipCounter:
    """Counts skipped steps; every process of a job counts the same.

    Args:
        limit: skipped steps in a row that are too many.
        total, streak: counts so far, from a checkpoint.

    Attributes:
        total: skipped steps of the run.
        streak: skipped steps in a row, up to the last one looked at.
    """

    def __init__(self, limit: int, total: int = 0, streak: int = 0):
        self._limit = limit
        self._pending: deque[tuple[int, Any]] = deque()
        self.total, self.streak = total, streak

    def add(self, step: int, skipped: Any) -> None:
        """A step was started; `skipped` (0 or 1, perhaps still being computed) is looked at LAG steps later.

        Raises:
            Unstable: an earlier step made it too many.
        """
        self._pending.append((step, skipped))
        while len(self._pending) > LAG:
            self._look()

    def catch_up(self) -> None:
        """Look at everything, waiting for the steps that still run.

        Raises:
            Unstable: one of them made it too many.
        """
        while self._pending:
            self._look()

    def _look(self) -> None:
        step, skipped = self._pending.popleft()
        if int(skipped):
            self.total += 1
            self.streak += 1
        else:
            self.streak = 0
        if self.streak >= self._limit:
            raise Unstable(step)
