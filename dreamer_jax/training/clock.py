"""How long train steps take, apart from what is done between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax


class Schedule(NamedTuple):
    """When something is done between train steps.

    every: steps from one time to the next; 0 for never.
    at_end: whether it is done after the last step in any case.
    """

    every: int
    at_end: bool

    def times(self, step: int, last: int) -> int:
        """How often it comes from the end of `step` to that of `last`, both counted."""
        if not self.every:
            return 0
        return last // self.every - (step - 1) // self.every + (self.at_end and last % self.every > 0)


class StepClock:
    """Times train steps. What is done between them, inside `beside`, isn't counted as theirs.

    Args:
        last: the last step of the run.
        schedules: what is done between steps, by name.
    """

    def __init__(self, last: int, schedules: Mapping[str, Schedule]):
        self._last, self._schedules = last, dict(schedules)
        self._took: dict[str, float] = {}  # seconds of the latest time
        self.start(0)

    def start(self, step: int) -> None:
        """Time the steps after this one, from now on."""
        self._step, self._since = step, time.perf_counter()

    def seconds_per_step(self, step: int) -> float:
        """Since `start`; this step has been waited for."""
        return (time.perf_counter() - self._since) / (step - self._step)

    @contextlib.contextmanager
    def beside(self, name: str, state: Any) -> Iterator[None]:
        """Leave out what is done inside.

        Args:
            name: what it is, as in `schedules`.
            state: of the last step; waited for first, because the step's own time goes on until it is there.
        """
        jax.block_until_ready(state)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._took[name] = time.perf_counter() - began
            self._since += self._took[name]

    def seconds_left(self, step: int, per_step: float) -> float:
        """Until the end of the run: the steps after this one, and what is still to come between them and after `step`.

        What is done between steps is taken to last as long as the latest time, and nothing before the first time.
        """
        between = (its.times(step, self._last) * self._took.get(name, 0.0) for name, its in self._schedules.items())
        return (self._last - step) * per_step + sum(between)
