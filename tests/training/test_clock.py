"""How long steps take, by a clock that stands still while nothing is done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dreamer_jax.training import clock
from dreamer_jax.training.clock import Schedule, StepClock


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """[the time], which the module under test reads."""
    time = [1000.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: time[0]))
    return time


def test_what_is_done_between_steps_is_not_theirs(now):
    timer = StepClock(10, {"evaluation": Schedule(2, at_end=True)})
    now[0] += 50
    timer.start(0)
    now[0] += 6
    with timer.beside("evaluation", {}):
        now[0] += 100
    now[0] += 2
    assert timer.seconds_per_step(4) == 2.0
    timer.start(4)
    now[0] += 3
    assert timer.seconds_per_step(5) == 3.0


def test_steps_that_still_run_are_waited_for_on_their_own_account(now, monkeypatch):
    def wait(state):
        now[0] += state

    monkeypatch.setattr(clock.jax, "block_until_ready", wait)
    timer = StepClock(10, {})
    with pytest.raises(ValueError, match="failed"), timer.beside("evaluation", 8.0):
        now[0] += 100
        raise ValueError("failed")
    assert timer.seconds_per_step(4) == 2.0


def test_time_left_holds_what_is_still_to_come(now):
    schedules = {"evaluation": Schedule(4, at_end=True), "analysis": Schedule(3, at_end=False)}
    timer = StepClock(10, schedules)
    assert timer.seconds_left(2, 2.0) == 16.0  # nobody knows yet how long the others take
    with timer.beside("evaluation", {}):
        now[0] += 100
    assert timer.seconds_left(4, 2.0) == 12.0 + 300  # after 4 itself, 8 and 10
    assert timer.seconds_left(5, 2.0) == 10.0 + 200
    with timer.beside("analysis", {}):
        now[0] += 7
    assert timer.seconds_left(6, 2.0) == 8.0 + 200 + 14  # 6 and 9, and none at the end


@pytest.mark.parametrize(("every", "at_end", "last"), [(3, True, 10), (3, False, 10), (5, True, 10), (11, True, 10)])
def test_times_by_counting(every, at_end, last):
    for step in range(1, last + 1):
        due = [s for s in range(step, last + 1) if s % every == 0 or (at_end and s == last)]
        assert Schedule(every, at_end).times(step, last) == len(due)
    assert Schedule(0, at_end).times(1, last) == 0
