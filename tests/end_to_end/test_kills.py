"""Runs that are killed, as processes of their own: what is recorded in the end is what an undisturbed run records."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etils import epath

from dreamer_jax.errors import RESTART_EXIT_CODE
from dreamer_jax.runs.metrics import read_metrics
from dreamer_jax.runs.step_folders import StepFolders
from tests.end_to_end.cases import TINY

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (
    TINY
    + """\
training:
  steps: {steps}
  batch_size: 8
  learning_rate: 3e-3
  warmup_steps: 5
  remat: none
  log_every: 1
checkpoint:
  every: {every}
evaluation:
  every: 50
"""
)
SECONDS_TO_NOTICE = 60


class Machine:
    """Where the processes of a test run: a configuration, and a compilation cache that they share."""

    def __init__(self, folder: Path, steps: int, every: int, variant: str = "LA", depth: int = 1):
        self.folder, self.steps = folder, steps
        self.config = folder / "tiny.yaml"
        self.config.write_text(CONFIG.format(variant=variant, depth=depth, steps=steps, every=every))
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]  # one device
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": " ".join(flags),
        }

    def start(self, directory: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start training; `launcher` are the words of launch/local.sh, for several processes."""
        train = ["train", str(self.config), "--run.dir", str(directory), *words]
        first = ["bash", str(ROOT / "launch/local.sh"), *launcher, "--"] if launcher else [sys.executable, "-m"]
        command = [*first, *([] if launcher else ["dreamer_jax"]), *train]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder
        )


def lines_of(process: subprocess.Popen[str], log: list[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line)
        yield line


def step_of(line: str) -> int:
    """The step that a line of progress is about, or 0."""
    found = re.match(r"step +(\d+)/", line)
    return int(found[1]) if found else 0


def finish(process: subprocess.Popen[str], log: list[str]) -> int:
    for _ in lines_of(process, log):
        pass
    return process.wait()


def until_saving(directory: Path) -> None:
    """Return when a checkpoint is being written, between its first file and its manifest."""
    folders, end = StepFolders(epath.Path(directory)), time.monotonic() + 5
    while time.monotonic() < end and not folders.unfinished() and folders.all() == folders.complete():
        pass


def without_times(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_metrics(directory)]


def assert_same_record(directory: Path, undisturbed: Path, steps: int) -> None:
    ours = without_times(directory)
    trained = [record["step"] for record in ours if "loss" in record]
    assert trained == list(range(1, steps + 1)), "a step is missing, or was recorded twice"
    assert ours == without_times(undisturbed)


def disturb(
    machine: Machine, directory: Path, signals: list[int], dice: random.Random, moment: Callable[[int], None]
) -> None:
    """Run to the end, with a signal after each further part of the steps; checks every resumption."""
    expected = None
    for number, sent in enumerate([*signals, 0], 1):
        log: list[str] = []
        target = machine.steps * number // (len(signals) + 2) + dice.randrange(3)
        process = machine.start(directory)
        for line in lines_of(process, log):
            if sent and step_of(line) >= target:
                moment(number)
                process.send_signal(sent)
                break
        code = finish(process, log)
        text = "".join(log)
        assert code == {0: 0, signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: RESTART_EXIT_CODE}[sent], text
        if expected is not None:
            assert f"resumed from checkpoint {expected}\n" in text, text
        if sent:
            folders = StepFolders(epath.Path(directory))
            expected = folders.complete()[-1]
            recorded = [int(record["step"]) for record in read_metrics(directory)][-1]
            lost = recorded - expected
            assert lost == 0 if sent == signal.SIGTERM else 0 <= lost <= 50, f"{lost} steps lost"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Machine:
    return Machine(tmp_path_factory.mktemp("small"), steps=60, every=5)


@pytest.mark.slow
def test_two_processes_of_which_one_dies(small):
    """The other one ends soon; the launcher starts both again; nothing of it is seen in the record.

    An undisturbed run would take as long again, so the losses are compared with those of one process.
    """
    dice = random.Random(1)
    alone, together = small.folder / "alone", small.folder / "together"
    log: list[str] = []
    assert finish(small.start(alone), log) == 0, "".join(log)
    seconds = kill_some(small, together, ["-n", "2"], ["--mesh.data", "2"], [(20, dice.randrange(2))])
    assert max(seconds) < SECONDS_TO_NOTICE
    ours, theirs = without_times(together), without_times(alone)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    assert [r["loss"] for r in ours if "loss" in r] == pytest.approx([r["loss"] for r in theirs if "loss" in r], 1e-4)


def kill_some(
    machine: Machine,
    directory: Path,
    launcher: list[str],
    words: list[str],
    victims: list[tuple[int, int]],
    sent: int = signal.SIGKILL,
) -> list[float]:
    """Run several processes; after some steps send one of them a signal. Returns the seconds until all had ended.

    Args:
        victims: (step, number of the process).
    """
    log: list[str] = []
    process = machine.start(directory, *words, launcher=tuple(launcher))
    pids: list[int] = []
    remaining, seconds, killed = list(victims), [], 0.0
    for line in lines_of(process, log):
        if line.startswith("local.sh: processes "):
            pids = [int(pid) for pid in line.split()[2:]]
        if line.startswith("local.sh: starting again"):
            seconds.append(time.monotonic() - killed)
        if remaining and pids and step_of(line) >= remaining[0][0]:
            killed = time.monotonic()
            os.kill(pids[remaining.pop(0)[1]], sent)
            pids = []
    assert process.wait() == 0 and not remaining, "".join(log)
    assert len(seconds) == len(victims), "".join(log)
    return seconds


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Machine:
    machine = Machine(tmp_path_factory.mktemp("large"), steps=400, every=5)
    log: list[str] = []
    assert finish(machine.start(machine.folder / "undisturbed"), log) == 0, "".join(log)
    return machine


@pytest.mark.slow
def test_killed_twenty_times(large):
    """At random moments; every third time while a checkpoint is being written."""
    dice = random.Random(2)
    directory = large.folder / "killed"

    def moment(number: int) -> None:
        time.sleep(dice.uniform(0, 0.1))
        if number % 3 == 0:
            until_saving(directory)
            time.sleep(dice.uniform(0, 0.05))

    disturb(large, directory, [signal.SIGKILL] * 20, dice, moment)
    assert_same_record(directory, large.folder / "undisturbed", large.steps)


@pytest.mark.slow
def test_asked_to_stop_twenty_times(large):
    """No step is lost: each time the run goes on from the step after the last one it recorded."""
    dice = random.Random(3)
    directory = large.folder / "stopped"
    disturb(large, directory, [signal.SIGTERM] * 20, dice, lambda _: time.sleep(dice.uniform(0, 0.1)))
    assert_same_record(directory, large.folder / "undisturbed", large.steps)


@pytest.mark.slow
def test_four_processes_of_which_one_dies(tmp_path):
    """Process 0, which coordinates the others, and another one."""
    machine = Machine(tmp_path, steps=60, every=5, variant="DR+DA", depth=2)
    launcher, words = ["-n", "4"], ["--mesh.data", "4"]
    assert kill_some(machine, tmp_path / "undisturbed", launcher, words, []) == []
    seconds = kill_some(
        machine, tmp_path / "killed", launcher, words, [(20, 0), (40, random.Random(4).randrange(1, 4))]
    )
    print("seconds from the kill until all had ended:", seconds)
    assert max(seconds) < SECONDS_TO_NOTICE
    assert_same_record(tmp_path / "killed", tmp_path / "undisturbed", machine.steps)


@pytest.mark.slow
def test_four_processes_saved_it_and_others_go_on(tmp_path):
    """Saved by 4 processes with 2 devices each: 1 x 1, 1 x 8 and 2 x 4 have the same next loss."""
    machine = Machine(tmp_path, steps=6, every=3, variant="DR+DA", depth=2)
    layouts = [("1", "8"), ("2", "4"), ("4", "2")]
    log: list[str] = []
    first = machine.start(tmp_path / "run", "--mesh.data", "8", launcher=("-n", "4", "-d", "2"))
    assert finish(first, log) == 0, "".join(log)
    losses = {}
    for processes, devices in [("1", "1"), *layouts]:
        directory = tmp_path / f"{processes}x{devices}"
        shutil.copytree(tmp_path / "run", directory)
        size = str(int(processes) * int(devices))
        words = ["--mesh.data", size, "--training.steps", "7"]
        log = []
        code = finish(machine.start(directory, *words, launcher=("-n", processes, "-d", devices)), log)
        assert code == 0 and "resumed from checkpoint 6" in "".join(log), "".join(log)
        losses[directory.name] = next(r["loss"] for r in read_metrics(directory) if r["step"] == 7 and "loss" in r)
    print("next loss:", losses)
    assert list(losses.values()) == pytest.approx([losses["4x2"]] * 4, abs=1e-6)


@pytest.mark.slow
def test_a_frozen_process_ends_the_job(small):
    """It doesn't die, it just does nothing any more; the others wait for it, until its heartbeat is missed."""
    directory = small.folder / "frozen"
    seconds = kill_some(small, directory, ["-n", "2"], ["--mesh.data", "2"], [(20, 1)], signal.SIGSTOP)
    print("seconds from the freeze until all had ended:", seconds)
    assert max(seconds) < 2 * SECONDS_TO_NOTICE
    assert [r["step"] for r in read_metrics(directory) if "loss" in r] == list(range(1, small.steps + 1))
