"""The training loop: data in, steps, metrics and checkpoints out, progress on the console."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dreamer_jax.chips import chip_of
from dreamer_jax.config import LoadedConfig
from dreamer_jax.config.sections import Config
from dreamer_jax.data import Data, Record, open_data
from dreamer_jax.errors import UserError
from dreamer_jax.families import KNOWLEDGE, build
from dreamer_jax.families.checking import check_logged
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.parallel.distributed import is_primary, largest, place_rows, rows_of_devices
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.folders import RunFolder, open_run, save_configuration, write_atomically
from dreamer_jax.runs.metrics import MetricsWriter, newest_values, read_metrics
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training import metrics as measure
from dreamer_jax.training.checks import check_alike, check_settings
from dreamer_jax.training.clock import Schedule, StepClock
from dreamer_jax.training.console import Console
from dreamer_jax.training.evaluation import evaluate, keep_parts
from dreamer_jax.training.figures import draw_figures
from dreamer_jax.training.heartbeat import Heartbeat
from dreamer_jax.training.memory import check_memory
from dreamer_jax.training.preemption import StopRequest
from dreamer_jax.training.recovery import Recovery, RunCounters, recorded_config
from dreamer_jax.training.stability import SkipCounter, Unstable
from dreamer_jax.training.state import check_beginning
from dreamer_jax.training.train_step import make_evaluation_step, make_train_step

EXAMPLES = 3


class Probe(Protocol):
    """Looks into the model now and then, at a few rows of a training batch.

    Attributes:
        observer: jitted, (params, model state, rows) -> sums of what it saw.
    """

    observer: Any

    def sample(self, batch: Any) -> Any:
        """The rows of a batch that it looks at, one for every device: [devices, S]."""

    def scalars(self, sums: Any, model_state: Any) -> dict[str, float]:
        """Numbers to record."""
        ...


@dataclasses.dataclass(frozen=True)
class Extras:
    """What runs beside training and needs rooms above this one; the command line hands it in.

    Attributes:
        benchmarks: (step, params, model state) -> numbers to record; run every `evaluation.tasks_every` steps, beside
            the evaluation, and after the last step.
        probe: (configuration, mesh) -> a probe, used every `analysis.every` steps.
        answer: (configuration, state, data, records) -> the model's answers to their prompts, shown at the end.
    """

    benchmarks: Callable[[int, Any, Any], Mapping[str, float]] | None = None
    probe: Callable[[Config, Mesh], Probe] | None = None
    answer: Callable[[Config, TrainState, Data, list[Record]], list[str]] | None = None


def train(loaded: LoadedConfig, extras: Extras = Extras()) -> int:
    """Train by a configuration, or go on with the run in `run.dir`; returns the exit code.

    0: the run is complete. RESTART_EXIT_CODE: it was asked to stop and has saved its state. With several processes
    every one of them calls this.

    Args:
        loaded: the configuration.
        extras: what runs beside training.
    Raises:
        UserError: for anything a person can mend: data, run directory, mesh, or a loss that isn't finite.
    """
    config = loaded.config
    console = Console(config, quiet=not is_primary())
    with StopRequest(console.say) as stop_request, Heartbeat(config.safety.stuck_seconds) as heartbeat:
        with heartbeat.suspended():
            mesh = make_mesh(config.mesh)
            check_settings(config)
            check_memory(config, mesh)
            data = open_data(config)
            check_alike(config, data)
            folder = open_run(loaded, recorded_config, check_beginning)
        with folder.alone():
            console.say(f"run {folder.place}: {build(config.model).headline()}; {data.summary}")
            if mesh.size < jax.device_count():
                console.say(
                    f"one of {jax.device_count()} devices is used; --mesh.data {jax.device_count()} takes all of them"
                )
            recovery = Recovery(loaded, data, mesh, console.say)
            try:
                with heartbeat.suspended():
                    state, counters = recovery.resume()
                if is_primary():
                    save_configuration(loaded, folder)
                loop = _Loop(config, console, mesh, data, folder, recovery, heartbeat, stop_request, extras)
                if int(state.step) >= config.training.steps:
                    console.say(f"the run is complete: {int(state.step)} steps of {config.training.steps}")
                    loop.end_here(state, counters)
                else:
                    state = loop.run(state, counters)
            except BaseException:  # perhaps of this process alone: the others can't be asked anything
                recovery.checkpoints.abandon()
                raise
            recovery.checkpoints.close()
            if loop.stopped:
                return stop_request.exit_code
            with heartbeat.suspended():
                _finish(config, console, folder, state, data, extras)
    return 0


class _Loop:
    """What stays the same from step to step."""

    def __init__(
        self,
        config: Config,
        console: Console,
        mesh: Mesh,
        data: Data,
        folder: RunFolder,
        recovery: Recovery,
        heartbeat: Heartbeat,
        stop_request: StopRequest,
        extras: Extras,
    ):
        self.config, self.console, self.data, self.folder = config, console, data, folder
        self.recovery, self.heartbeat, self.stop_request = recovery, heartbeat, stop_request
        self.checkpoints: Checkpoints = recovery.checkpoints
        self.last_step = config.training.steps
        self.sharding = NamedSharding(mesh, batch_spec(mesh))
        self.rows = rows_of_devices(config.training.batch_size, self.sharding)
        self.mesh = mesh
        self.family = build(config.model)
        self.train_step: Any = make_train_step(config, mesh)
        self.evaluation_step: Any = make_evaluation_step(config, mesh)
        self.probe = extras.probe(config, mesh) if extras.probe and config.analysis.every else None
        self.chip = chip_of(mesh.devices.flat[0].device_kind)
        self.compiled = False
        self.benchmarks = extras.benchmarks
        self.clock = StepClock(self.last_step, self._schedules())
        self.writer: MetricsWriter | None = None
        self.stopped = False
        """Whether the run was asked to stop, and did."""

    def run(self, state: TrainState, counters: RunCounters) -> TrainState:
        """Train from the state's step to the last one, or until the run is asked to stop; returns the state."""
        step = int(state.step)
        if is_primary():
            self.writer = MetricsWriter(self.folder.local, step, self.console.say)
        try:
            while True:
                try:
                    return self._stretch(state, counters)
                except Unstable as failure:
                    del state  # the device may not have room for two
                    with self.heartbeat.suspended():
                        state, counters = self.recovery.roll_back(failure.step, self._here())
                    if self.writer:
                        self.writer.rewind(int(state.step))
        finally:
            if self.writer:
                self.writer.close()
            self._publish()

    def end_here(self, state: TrainState, counters: RunCounters) -> None:
        """Of a run that has all its steps: where `training.steps` was lowered to those of an earlier checkpoint, what
        was recorded of later ones goes, and the last step is evaluated as ever."""
        step = int(state.step)
        newest = max((int(record["step"]) for record in read_metrics(self.folder.local)), default=0)
        if largest(newest) <= step:
            return
        self.counter = SkipCounter(self.config.safety.skipped_in_a_row, counters.skipped, counters.streak)
        if is_primary():
            self.writer = MetricsWriter(self.folder.local, step, self.console.say)
        try:
            self.console.say(f"records of the steps after {step} are removed; evaluating step {step} ...")
            with self.heartbeat.suspended():
                self._evaluate(step, state)
                if self.benchmarks:
                    self._write(step, dict(self.benchmarks(step, state.params, state.model_state)))
        finally:
            if self.writer:
                self.writer.close()
            self._publish()

    def _stretch(self, state: TrainState, counters: RunCounters) -> TrainState:
        """Train on until the end, a request to stop, or `Unstable`."""
        start = int(state.step)
        self.counters = counters
        self.counter = SkipCounter(self.config.safety.skipped_in_a_row, counters.skipped, counters.streak)
        offset = counters.offset
        batches: Any = self.data.training_batches(start + offset, self.last_step + offset, self.rows)
        try:
            with self.heartbeat.suspended():  # a run that goes on plans all its epochs so far again
                first = next(batches)
            self._compile_all(state, first[1])
            self.clock.start(start)
            for position, batch in itertools.chain([first], batches):
                state, step_metrics = self.train_step(state, self._place(batch))
                done = position + 1 - offset
                self.counter.add(done, step_metrics.pop("skipped"))
                self.heartbeat.beat()
                last = done == self.last_step
                self.stopped = self.stop_request.reached() and not last
                if done % self.config.training.log_every == 0 or last or done == 1:
                    self._log(done, step_metrics, state)
                    self.checkpoints.settle()
                    self.clock.start(done)
                if self.probe and done % self.config.analysis.every == 0:
                    with self.clock.beside("analysis", state):
                        self._analyze(done, state, batch)
                if done % self.config.evaluation.every == 0 or last:
                    with self.clock.beside("evaluation", state):
                        self._evaluate(done, state)
                if self.benchmarks and (done % self._benchmarks_every == 0 or last):
                    with self.clock.beside("benchmarks", state), self.heartbeat.suspended():
                        self._write(done, dict(self.benchmarks(done, state.params, state.model_state)))
                if last or self.stopped:
                    self._save_at_the_end(state, done)
                    return state
                if self.recovery.is_due(done):
                    with self.clock.beside("saving", state):
                        self._save(state, done)
        finally:
            batches.close()
        raise AssertionError("the data ended before the last step")

    @property
    def _benchmarks_every(self) -> int:
        return self.config.evaluation.tasks_every or self.config.evaluation.every

    def _schedules(self) -> dict[str, Schedule]:
        """What is done between train steps."""
        return {
            "analysis": Schedule(self.config.analysis.every, at_end=False),
            "evaluation": Schedule(self.config.evaluation.every, at_end=True),
            "benchmarks": Schedule(self._benchmarks_every, at_end=True),
            "saving": Schedule(self.config.checkpoint.every, at_end=True),
        }

    def _compile_all(self, state: TrainState, batch: dict[str, np.ndarray]) -> None:
        if self.compiled:
            return
        placed = self._place(batch)
        with self.heartbeat.suspended():
            self.train_step = self._compile("train step", self.train_step, state, placed)
            heldout = {name: its for name, its in placed.items() if name != "step_targets"}
            self.evaluation_step = self._compile(
                "evaluation", self.evaluation_step, state.params, state.model_state, heldout
            )
            if self.probe:
                observer = (self.probe.observer, state.params, state.model_state, self._sample(batch))
                self.probe.observer = self._compile("analysis", *observer)
        self.compiled = True

    def _compile(self, name: str, function, *arguments):
        """Compile ahead of time: a later call with other shapes or types is an error, never a silent recompilation."""
        began = time.perf_counter()
        self.console.say(f"compiling the {name} ...")
        compiled = function.lower(*arguments).compile()
        self.console.say(f"compiled the {name} in {time.perf_counter() - began:.1f} s")
        return compiled

    def _place(self, batch: dict[str, np.ndarray]) -> Any:
        """This process's rows of a training batch onto its devices."""
        return place_rows(batch, self.rows, self.config.training.batch_size, self.sharding)

    def _place_whole(self, batch: dict[str, np.ndarray]) -> Any:
        """A batch of which every process has all rows."""
        self.heartbeat.beat()
        total = self.config.training.batch_size
        return place_rows(batch, range(total), total, self.sharding)

    def _sample(self, batch: dict[str, np.ndarray]) -> Any:
        assert self.probe is not None
        share = self.config.training.batch_size // self.mesh.size
        rows = range(self.rows.start // share, self.rows.stop // share)
        return place_rows(self.probe.sample(batch), rows, self.mesh.size, self.sharding)

    def _log(self, step: int, step_metrics: dict[str, Any], state: TrainState) -> None:
        own = {name: its for name, its in state.model_state.items() if name != KNOWLEDGE}
        values = jax.device_get({**step_metrics, "model_state": own})  # waits for the step
        seconds = self.clock.seconds_per_step(step)
        self.counter.catch_up()
        counts, model_state = values.pop("counts"), values.pop("model_state")
        record = {name: float(value) for name, value in values.items()}
        logged = self.family.log(model_state, counts)
        check_logged(self.family, "log", logged)
        record |= logged
        tokens = self.config.training.batch_size * self.config.data.sequence_length
        record["tokens"] = step * tokens
        record["skipped"] = self.counter.total
        record["rollbacks"] = self.counters.rollbacks
        record["time/tokens_per_second"] = rate = tokens / seconds
        utilisation = measure.model_flop_utilisation(self.config, rate, self.chip)
        if utilisation is not None:
            record["time/model_flop_utilisation"] = utilisation
        self._write(step, record)
        self.console.progress(step, record, self.clock.seconds_left(step, seconds))

    def _write(self, step: int, record: dict[str, float]) -> None:
        if self.writer:
            self.writer.write(step, record)

    def _analyze(self, step: int, state: TrainState, batch: dict[str, np.ndarray]) -> None:
        """Write the statistics of a few rows."""
        assert self.probe is not None
        sums = self.probe.observer(state.params, state.model_state, self._sample(batch))
        self._write(step, self.probe.scalars(sums, state.model_state))

    def _evaluate(self, step: int, state: TrainState) -> None:
        self.counter.catch_up()
        found = evaluate(self.evaluation_step, self._place_whole, state, self.data)
        if found.metrics:
            self._write(step, found.metrics)
            self.console.evaluation(step, found.metrics)
            if self.writer:
                keep_parts(self.folder.local, step, found.parts)
        self._publish()

    def _save(self, state: TrainState, done: int) -> None:
        """Save, unless the last steps were skipped: the run may have to go back behind them."""
        self.counter.catch_up()
        if self.counter.streak == 0:
            if self.writer:
                self.writer.flush()
            self.recovery.save(state, done, self._here())
            self._publish()

    def _save_at_the_end(self, state: TrainState, done: int) -> None:
        """Save and wait for it."""
        self.counter.catch_up()
        if self.writer:
            self.writer.flush()
        with self.heartbeat.suspended():
            try:
                tries, asked = (2, lambda: False) if self.stopped else (5, self._asked_meanwhile)
                self.recovery.save_now(state, done, self._here(), tries, asked)
            except UserError as error:
                if not self.stopped:
                    raise
                self.console.say(f"asked to stop, but {error}")  # nothing is lost: a restart repeats the steps
                return
        if self.stopped:
            self.console.say(f"asked to stop: saved step {self.checkpoints.saved}; start the same command to go on")

    def _asked_meanwhile(self) -> bool:
        self.stopped = self.stop_request.reached()
        return self.stopped

    def _here(self) -> RunCounters:
        return dataclasses.replace(self.counters, skipped=self.counter.total, streak=self.counter.streak)

    def _publish(self) -> None:
        """Copy the small files to the bucket, where the run lies on one; failure is only said."""
        try:
            self.folder.publish()
        except Exception as error:  # whatever a bucket raises; the next attempt copies everything
            self.console.say(f"the metrics can't be copied to {self.folder.place}: {error}; trying again later")


def _finish(config: Config, console: Console, folder: RunFolder, state: TrainState, data: Data, extras: Extras) -> None:
    """Summary, figures and worked examples of a complete run."""
    if not is_primary():
        return
    summary, file = newest_values(read_metrics(folder.local)), folder.local / "summary.json"
    try:
        if summary or not file.exists():
            write_atomically(file, json.dumps(summary, indent=1) + "\n")
        else:
            console.say(f"{folder.local} has no records of training any more; {file.name} stays as it is")
        figures = draw_figures(folder.local)
        folder.publish()
    except OSError as error:
        raise UserError(f"the run is trained and saved, but its summary can't be written: {error}") from error
    generates = build(config.model).flags.generates and config.data.copies == 1
    answers_here = generates and jax.process_count() == 1  # not from one host of several
    if extras.answer and answers_here:
        for kind, records in (("held-out", data.heldout_records(EXAMPLES)), ("harder", data.harder_records(EXAMPLES))):
            if records and any(record.prompt for record in records):
                answers = extras.answer(config, state, data, records)
                console.examples(f"{kind} examples", records, answers)
    for path in figures:
        console.say(f"figure {path}")
    console.say(f"done: {folder.place}")
