"""The training loop: data in, steps, metrics and checkpoints out, progress on the console."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dreamer_jax.analysis.sampling import Sampler
from dreamer_jax.config import LoadedConfig
from dreamer_jax.config.errors import UserError
from dreamer_jax.config.schema import Config
from dreamer_jax.data import open_data
from dreamer_jax.parallel import batch_spec, chip_of, make_mesh
from dreamer_jax.training import metrics as measure
from dreamer_jax.training.checkpoints import Checkpoints
from dreamer_jax.training.console import Console
from dreamer_jax.training.evaluation import answer, evaluate
from dreamer_jax.training.figures import draw_figures
from dreamer_jax.training.run_directory import open_run, save_configuration
from dreamer_jax.training.state import TrainState, create_state
from dreamer_jax.training.train_step import make_evaluation_step, make_train_step

EXAMPLES = 3


def train(loaded: LoadedConfig) -> int:
    """Train by a configuration, or go on with the run in `run.dir`; returns the exit code.

    Raises:
        UserError: for anything a person can mend: data, run directory, mesh, or a loss that isn't finite.
    """
    config = loaded.config
    console = Console(config)
    mesh = make_mesh(config.mesh)
    data = open_data(config)
    directory = open_run(loaded)
    console.say(f"run {directory}: {config.model.variant}, depth {config.model.depth}; {data.summary}")

    state = create_state(config, mesh)
    meta = {"data": data.fingerprint, "tokenizer": data.tokenizer.fingerprint}
    checkpoints = Checkpoints(directory, config.checkpoint, meta)
    try:
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
            console.say(f"resumed from checkpoint {checkpoints.latest}")
        save_configuration(loaded)
        start = int(state.step)
        if start >= config.training.steps:
            console.say(f"the run is complete: {start} steps of {config.training.steps}")
        else:
            state = _Loop(config, console, mesh, data, directory, checkpoints, start).run(state)
    finally:
        checkpoints.close()
    _finish(config, console, directory, state, data)
    return 0


class _Loop:
    """What stays the same from step to step."""

    def __init__(self, config: Config, console: Console, mesh, data, directory: Path, checkpoints, start: int):
        self.config, self.console, self.data, self.checkpoints = config, console, data, checkpoints
        self.start, self.stop = start, config.training.steps
        self.rows = NamedSharding(mesh, batch_spec(mesh))
        self.train_step = make_train_step(config, mesh)
        self.evaluation_step = make_evaluation_step(config, mesh)
        self.sampler = Sampler(config, mesh) if config.analysis.every else None
        self.writer = measure.MetricsWriter(directory, start)
        self.chip = chip_of(mesh.devices.flat[0].device_kind)

    def run(self, state: TrainState) -> TrainState:
        """Train from the start step to the last one; returns the final state."""
        batches = self.data.training_batches(self.start, self.stop)
        try:
            first = next(batches)
            step_function = self._compile("train step", self.train_step, state, self._place(first[1]))
            self.evaluation_step = self._compile(
                "evaluation", self.evaluation_step, state.params, state.balancing, self._place(first[1])
            )
            if self.sampler:
                sample = self._place(self.sampler.sample(first[1]))
                observer = (self.sampler.observer, state.params, state.balancing, sample)
                self.sampler.observer = self._compile("analysis", *observer)
            since, seconds = self.start, time.perf_counter()
            for step, batch in _chain(first, batches):
                state, step_metrics = step_function(state, self._place(batch))
                done = step + 1
                last = done == self.stop
                if done % self.config.training.log_every == 0 or last or done == 1:
                    self._log(done, step_metrics, state, (done - since), seconds)
                    since, seconds = done, time.perf_counter()
                if self.sampler and done % self.config.analysis.every == 0:
                    seconds += self._analyze(done, state, batch)
                evaluate_now = done % self.config.evaluation.every == 0 or last
                save_now = done % self.config.checkpoint.every == 0 or last
                if evaluate_now or save_now:
                    self._check(done, step_metrics)
                if evaluate_now:
                    self._evaluate(done, state)
                    seconds = time.perf_counter()
                if save_now:
                    self.checkpoints.save(state)
        finally:
            batches.close()
            self.writer.close()
        return state

    def _compile(self, name: str, function, *arguments):
        """Compile ahead of time: a later call with other shapes or types is an error, never a silent recompilation."""
        began = time.perf_counter()
        self.console.say(f"compiling the {name} ...")
        compiled = function.lower(*arguments).compile()
        self.console.say(f"compiled the {name} in {time.perf_counter() - began:.1f} s")
        return compiled

    def _place(self, batch: dict[str, np.ndarray]) -> Any:
        return jax.device_put(batch, self.rows)

    def _log(self, step: int, step_metrics: dict[str, Any], state: TrainState, steps: int, since: float) -> None:
        values = jax.device_get({**step_metrics, "balancing": state.balancing})  # waits for the step
        elapsed = time.perf_counter() - since
        counts, balancing = values.pop("counts"), values.pop("balancing")
        self._check(step, values)
        record = {name: float(value) for name, value in values.items()}
        tokens = self.config.training.batch_size * self.config.data.sequence_length
        record |= measure.expert_use(counts, self.config.model.recurrent)
        record |= measure.bias_range(balancing)
        record["tokens"] = step * tokens
        record["time/tokens_per_second"] = rate = tokens * steps / elapsed
        utilisation = measure.model_flop_utilisation(self.config, rate, self.chip)
        if utilisation is not None:
            record["time/model_flop_utilisation"] = utilisation
        self.writer.write(step, record)
        self.console.progress(step, record, elapsed / steps * (self.stop - step))

    def _analyze(self, step: int, state: TrainState, batch: dict[str, np.ndarray]) -> float:
        """Write the statistics of a few rows; returns the seconds that took, which are not the train step's."""
        assert self.sampler is not None
        jax.block_until_ready(state)
        began = time.perf_counter()
        sums = self.sampler.observer(state.params, state.balancing, self._place(self.sampler.sample(batch)))
        self.writer.write(step, self.sampler.scalars(sums, state.balancing))
        return time.perf_counter() - began

    def _check(self, step: int, step_metrics: dict[str, Any]) -> None:
        """Stop a run that has diverged, before anything of it is written or saved."""
        loss, norm = float(step_metrics["loss"]), float(step_metrics["gradient_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(
                f"the loss is {loss} and the gradient norm {norm} at step {step}: training has diverged; start again "
                "with a lower --training.learning_rate and another --run.dir"
            )

    def _evaluate(self, step: int, state: TrainState) -> None:
        record = evaluate(self.evaluation_step, self._place, state, self.data)
        if record:
            self.writer.write(step, record)
            self.console.evaluation(step, record)


def _chain(first, rest):
    yield first
    yield from rest


def _finish(config: Config, console: Console, directory: Path, state: TrainState, data) -> None:
    """Summary, figures and worked examples of a complete run."""
    last: dict[str, float] = {}
    for record in measure.read_metrics(directory):
        last |= record
    (directory / "summary.json").write_text(json.dumps(last, indent=1) + "\n", encoding="utf-8")
    for kind, records in (("held-out", data.heldout_records(EXAMPLES)), ("harder", data.harder_records(EXAMPLES))):
        if records and any(record.prompt for record in records):
            answers = answer(config, state, data, records)
            console.examples(f"{kind} examples", records, answers)
    for path in draw_figures(directory):
        console.say(f"figure {path}")
    console.say(f"done: {directory}")
