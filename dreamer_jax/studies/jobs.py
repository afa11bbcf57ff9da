"""The runs of a study as processes: `dreamer train`, then `dreamer depth`, so many at once as there is room for.

Each run is one that the commands in its log would make. Processes are used because a device belongs to one of them, and
because a process that ends gives back all that it compiled. What one has compiled is kept for the others
(`program_cache`, by the number of cores that a run gets): seeds of one member run the same programs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO

from dreamer_jax.config import LoadedConfig, load_config
from dreamer_jax.config.writing import to_yaml
from dreamer_jax.errors import DIVERGED, INTERRUPTED_EXIT_CODE, RESTART_EXIT_CODE, UserError
from dreamer_jax.runs.folders import open_run, write_atomically
from dreamer_jax.runs.models import locate_run

PROGRAM = (sys.executable, "-m", "dreamer_jax")
"""What commands start with."""
SAYS = "dreamer: error: "
"""What its errors start with."""
GRACE_SECONDS = 120
"""What a run gets to save itself when the study is asked to stop."""
LINE_SECONDS = 30
"""Between lines of progress."""


@dataclass(frozen=True)
class Job:
    """A run that is to be made, or finished.

    Attributes:
        name: such as text/la/seed0; of its configuration and log, too.
        loaded: its configuration.
        depths: at which it is evaluated afterwards, as `dreamer depth` takes them; empty: not at all.
        instances: of each difficulty, which it answers at those depths; 0: none.
    """

    name: str
    loaded: LoadedConfig
    depths: str
    instances: int = 0

    @property
    def run(self) -> Path:
        """The run directory."""
        return Path(self.loaded.config.run.dir)


def trained(loaded: LoadedConfig) -> bool:
    """Whether a run has all its steps.

    Raises:
        UserError: its folder holds a run with another configuration, or of another length: its learning rate has
            fallen, or will fall, elsewhere, so that going on with it doesn't make the run that the study compares.
    """
    run, steps = Path(loaded.config.run.dir), loaded.config.training.steps
    if (run / "config.yaml").is_file():
        begun = load_config(run / "config.yaml").config.training.steps
        if begun != steps:
            raise UserError(
                f"{run} is a run of {begun} steps, and this study's runs have {steps}; name another folder with --out"
            )
    if not (run / "summary.json").is_file():
        return False
    open_run(loaded)
    return locate_run(run).step == steps


class RunsFailed(UserError):
    """Runs ended with an error; the others are complete.

    Args:
        lines: the last that each of them printed, and where, by name.
    """

    def __init__(self, lines: Mapping[str, str]):
        super().__init__(f"{'; '.join(lines.values())}; the other runs are complete, and the same command tries again")
        self.diverged = {name for name, line in lines.items() if DIVERGED in line}
        self.others = lines.keys() - self.diverged


@dataclass
class _Running:
    job: Job
    place: int
    log: Path
    lock: IO[bytes]
    commands: deque[list[str]]
    process: subprocess.Popen[bytes] = field(init=False)

    def start_next(self, at_once: int) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, *self.commands.popleft()],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(self.place, at_once),
                start_new_session=True,  # Ctrl-C reaches the study, which asks its runs to stop
                pass_fds=(self.lock.fileno(),),  # a run that outlives a killed study keeps its lock
            )
        _pin(self.process.pid, self.place, at_once)

    def last_line(self) -> str:
        """The last that it printed, if anything."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def run_jobs(jobs: Sequence[Job], folder: Path, at_once: int, say: Callable[[str], None]) -> int:
    """Make all runs; returns 0, or RESTART_EXIT_CODE where the study was asked to stop and its runs have saved,
    INTERRUPTED_EXIT_CODE where that was by Ctrl-C.

    Args:
        jobs: those that are complete already end at once.
        folder: of the study; configurations go to configs/ in it, what runs print to logs/.
        at_once: processes at a time. On a CPU each gets its share of the cores, on GPUs and TPUs a device of its own.
        say: gets lines of progress.

    Raises:
        RunsFailed: after the others have been made.
    """
    waiting, running, failed = deque(jobs), list[_Running](), dict[str, str]()
    began = said = time.monotonic()
    done = 0
    with _stopping() as stopping:
        try:
            while (waiting or running) and not stopping:
                while waiting and len(running) < at_once:
                    places = set(range(at_once)) - {each.place for each in running}
                    job = waiting.popleft()
                    try:
                        running.append(_start(job, folder, min(places), at_once))
                    except UserError as error:  # it is another process's
                        done += 1
                        failed[job.name] = f"{job.name}: {error}"
                        say(f"{done}/{len(jobs)} {failed[job.name]}")
                time.sleep(0.2)
                for each in tuple(running):
                    if (code := each.process.poll()) is None:
                        continue
                    if each.commands and not code:
                        each.start_next(at_once)
                        continue
                    running.remove(each)
                    each.lock.close()
                    done += 1
                    left = _left(time.monotonic() - began, done, len(running), len(jobs))
                    end = "is complete"
                    if code:
                        end = f"failed ({each.log}): {each.last_line().removeprefix(SAYS)}"
                        failed[each.job.name] = f"{each.job.name} {end}"
                    say(f"{done}/{len(jobs)} {each.job.name} {end}; about {timedelta(seconds=round(left))} left")
                if time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    for each in running:
                        say(f"  {each.job.name}: {each.last_line() or 'starting'}")
        finally:
            _stop(running, say)
    if failed and not stopping:
        raise RunsFailed(failed)
    if signal.SIGINT in stopping:
        return INTERRUPTED_EXIT_CODE
    return RESTART_EXIT_CODE if stopping else 0


def _left(seconds: float, done: int, running: int, jobs: int) -> float:
    """Seconds that the other runs will take; those that are being made are half made on average."""
    made = done + running / 2
    return seconds / made * (jobs - made)


def _start(job: Job, folder: Path, place: int, at_once: int) -> _Running:
    config, log = folder / "configs" / f"{job.name}.yaml", folder / "logs" / f"{job.name}.log"
    for file in (config, log):
        file.parent.mkdir(parents=True, exist_ok=True)
    lock = _locked(log)
    write_atomically(config, to_yaml(job.loaded.config))
    commands = deque([["train", str(config)]])
    if job.depths:
        commands.append(
            [
                *("depth", str(job.run), "--loss-only", "--experts"),
                *([] if job.depths == "usual" else ["--depths", job.depths]),
                *(["--instances", str(job.instances)] if job.instances else []),
            ]
        )
    started = _Running(job, place, log, lock, commands)
    started.start_next(at_once)
    return started


def _locked(log: Path) -> IO[bytes]:
    """The lock of a run, held until it is closed here and in the run's process.

    Raises:
        UserError: a process of a study that was killed, or of another, still has it.
    """
    lock = log.with_suffix(".lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UserError(f"another process is making this run; see {log}, and wait or stop it") from None
    return lock


def _environment(place: int, at_once: int) -> dict[str, str]:
    """The variables of a run: which of several devices is its own."""
    found = dict(os.environ)
    if at_once > 1:
        one = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
        found |= {"CUDA_VISIBLE_DEVICES": str(place), "TPU_VISIBLE_CHIPS": str(place), **one}
    return found


def _pin(process: int, place: int, at_once: int) -> None:
    """Give a process its share of the cores, before it has started threads."""
    if at_once == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    own = cores[place * len(cores) // at_once : (place + 1) * len(cores) // at_once] or cores
    with suppress(ProcessLookupError):  # it has ended at once, with an error that its log holds
        os.sched_setaffinity(process, own)


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """A list that is empty until SIGINT or SIGTERM."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in _SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _stop(running: Sequence[_Running], say: Callable[[str], None]) -> None:
    """Ask what still runs to save and end, and wait for it."""
    alive = [each for each in running if each.process.poll() is None]
    if not alive:
        return
    for each in alive:  # before a word is said: who was to read it may be gone
        each.process.terminate()
    say(f"stopping {', '.join(each.job.name for each in alive)} ...")
    end = time.monotonic() + GRACE_SECONDS
    for each in alive:
        try:
            each.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
    say("stopped; start the same command to go on")
