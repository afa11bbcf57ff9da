"""One run to its end: the machine had, the workers started and followed, and started again after every preemption."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dreamer_jax.errors import UserError
from dreamer_jax.launching.cloud import CloudError, Kind
from dreamer_jax.launching.machine import TRIES, Machine, Preempted, Report

NEVER_AGAIN = (1, 2, 130)
"""Exit codes of `dreamer train` after which it must not be started again: a defect, a person's error, an interrupt."""
SHORT_SECONDS = 600.0
"""An attempt that ended sooner counts as a failure."""
GRACE_POLLS = 9
"""Polls that workers have to end after the first of them did."""
UNREACHABLE_POLLS = 30
"""Polls that a worker may be silent on a machine that is ready."""
LINGER_POLLS = 3
"""Polls after the workers ended by themselves in which it shows whether a preemption was the cause."""
PATIENCE = 288
"""Pauses of up to five minutes in which the cloud may be out of reach: a day."""


class Verdict(enum.Enum):
    """How an attempt ended."""

    FINISHED = "finished"
    AGAIN = "to be started again"
    FAILED = "failed"
    SILENT = "silent"


@dataclass
class Supervisor:
    """Drives a machine's workers until the run is finished.

    Attributes:
        machine: the run's machine.
        show: prints lines of the training log.
        log_file: keeps them.
        keep: leave the machine when the run has ended.
        clock: seconds.
    """

    machine: Machine
    show: Callable[[str], None]
    log_file: Path
    keep: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._next_line = 1

    def run(self) -> int:
        """Supervise until the run is finished (returns 0) or can't be (returns 1).

        Raises:
            UserError: when it can't be started, or the cloud refuses; the machine is deleted unless `keep`.
            Asked: when another launcher was asked to stop or delete the run.
        """
        try:
            code = self._until_ended()
        except UserError as error:
            try:
                self._end()
            except UserError:
                self.machine.say(str(error))  # what began it; what is left behind matters more now
                raise
            raise
        self._end()
        return code

    def _until_ended(self) -> int:
        short = 0
        say = self.machine.say
        while True:
            try:
                verdict, seconds = self._once()
            except Preempted as event:
                say(f"preempted: {event}; deleting what is left and asking for another machine")
                self._patiently(self.machine.remove)
                short += event.counts
            else:
                if verdict is Verdict.FINISHED:
                    say(f"finished: {self.machine.settings.run_dir}")
                    return 0
                if verdict is Verdict.FAILED:
                    return 1
                short = short + 1 if seconds < SHORT_SECONDS else 0
            if short >= self.machine.settings.failures:
                say(
                    f"giving up: {short} attempts in a row ended within {SHORT_SECONDS / 60:.0f} minutes of their start"
                )
                return 1
            self.machine.pause()

    def _once(self) -> tuple[Verdict, float]:
        """One attempt and the seconds it took; Preempted when it ended because the machine was taken away."""
        machine = self.machine
        self._patiently(machine.ensure)
        self._patiently(machine.install)
        began = self.clock()
        verdict = self._attempt()
        seconds = self.clock() - began
        if verdict is Verdict.SILENT:
            machine.save(installed="")  # perhaps it was set up anew
            try:
                machine.install()
                silent = len(machine.reports()) < machine.pods
            except UserError:
                silent = True
            if silent:
                raise Preempted("its workers stay silent though it is said to be ready", counts=True)
        if verdict is Verdict.AGAIN:
            for _ in range(LINGER_POLLS):
                machine.pause()
                self._patiently(machine.look)
        return verdict, seconds

    def _attempt(self) -> Verdict:
        """Start the workers, or go on with those that run, and watch them."""
        machine = self.machine
        reports = machine.reports()
        for _ in range(TRIES):  # connections drop, and one that does is no reason to start all workers anew
            if len(reports) == machine.pods or machine.state.attempt == 0:
                break
            machine.pause()
            reports = machine.reports()
        same = machine.state.words == tuple(machine.settings.training_words())
        current = [r for r in reports if r.attempt == machine.state.attempt and r.attempt > 0]
        alive = len(current) == machine.pods and all(r.state == "running" or r.code == 0 for r in current)
        if same and alive:
            machine.say(f"the workers are at attempt {machine.state.attempt}; going on with it")
            self._next_line = max(1, self._first(current).lines - 20)
        else:
            if any(r.state == "running" for r in reports):
                machine.stop()
            self._next_line = self._first(reports).lines + 1 if reports else 1
            self._patiently(machine.start)
        return self._watch()

    def _watch(self) -> Verdict:
        machine, ending, silent = self.machine, 0, 0
        while True:
            machine.pause()
            ready = self._patiently(machine.look)
            reports = [r for r in machine.reports() if r.attempt == machine.state.attempt] if ready else []
            self._show_log()
            verdict = self._judge(reports)
            if verdict is not None:
                return verdict
            ending = ending + 1 if any(r.state != "running" for r in reports) else 0
            if ending > GRACE_POLLS:
                machine.say("some workers have ended and others have not; ending them all")
                machine.stop()
                return Verdict.AGAIN
            silent = silent + 1 if ready and len(reports) < machine.pods else 0
            if silent >= UNREACHABLE_POLLS:
                machine.say(f"{machine.pods - len(reports)} of {machine.pods} workers do not answer")
                return Verdict.SILENT

    def _judge(self, reports: list[Report]) -> Verdict | None:
        """The verdict on these reports, or None while the attempt goes on."""
        machine = self.machine
        broken = next((r for r in reports if r.code in NEVER_AGAIN), None)
        if broken is not None:
            machine.say(f"`dreamer train` ended with exit code {broken.code} on worker {broken.worker}; it said:")
            for line in machine.log(max(1, broken.lines - 30), broken.worker):
                self.show(line)
            return Verdict.FAILED
        if len(reports) < machine.pods or any(r.state == "running" for r in reports):
            return None
        if all(r.code == 0 for r in reports):
            return Verdict.FINISHED
        codes = sorted({"lost" if r.code is None else str(r.code) for r in reports})
        machine.say(f"the workers ended (exit codes {', '.join(codes)}); starting them again")
        return Verdict.AGAIN

    def _show_log(self) -> None:
        lines = self.machine.log(self._next_line)
        self._next_line += len(lines)
        if lines:
            with open(self.log_file, "a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        for line in lines:
            self.show(line)

    def _patiently(self, action: Callable):
        """An action once the cloud can be reached and the login holds: the run goes on meanwhile."""
        for attempt in range(PATIENCE):
            try:
                return action()
            except CloudError as error:
                under_way = self.machine.state.attempt > 0 or self.machine.state.phase != "absent"
                if not (under_way and error.kind in (Kind.PASSING, Kind.LOGIN)):
                    raise
                self.machine.say(f"{error}; trying again")
                self.machine.pause(min(300.0, self.machine.poll_seconds * (attempt + 1)))
        raise UserError("the cloud could not be reached for a day")

    def _end(self) -> None:
        """The machine is deleted, since it costs money."""
        state = self.machine.state
        if state.phase != "absent" and not self.keep:
            self._patiently(self.machine.remove)

    @staticmethod
    def _first(reports: list[Report]) -> Report:
        return min(reports, key=lambda report: int(report.worker))
