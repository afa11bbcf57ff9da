"""How fast the real train step is, on random tokens; and how fast next to another implementation, interleaved."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dreamer_jax.benchmarks import profiling, qwen3
from dreamer_jax.budget import analytic
from dreamer_jax.chips import chip_of
from dreamer_jax.config.sections import Config
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.families.puzzles import PuzzleFamily
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.training.batch import batch_entries
from dreamer_jax.training.metrics import model_flop_utilisation
from dreamer_jax.training.state import create_state
from dreamer_jax.training.train_step import make_train_step
from dreamer_jax.training.work import work_of

TURN = 4
"""Steps of one side before the other's turn."""
SETTLING_STEPS = 2
"""Steps after the first that aren't counted."""

Measurement = dict[str, Any]


class OurStep:
    """The train step of a configuration with its state, compiled ahead of time.

    Attributes:
        state: of training, donated to the next step.
        compiled: the step as a program.
        compile_seconds: wall time of tracing and compiling.
    """

    def __init__(self, config: Config):
        mesh = make_mesh(config.mesh)
        self._config, self._rows = config, NamedSharding(mesh, batch_spec(mesh))
        self.state = create_state(config, mesh)
        batch = self._place(*random_batch(config, 0))
        began = time.perf_counter()
        self._lowered = make_train_step(config, mesh).lower(self.state, batch)
        self.compiled = self._lowered.compile()
        self.compile_seconds = time.perf_counter() - began

    def launch_one_by_one(self) -> None:
        """On a GPU, compile again: operations that it launches as a graph have no names in a trace."""
        if jax.default_backend() == "gpu":
            self.compiled = self._lowered.compile({"xla_gpu_enable_command_buffer": ""})

    def __call__(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """One step on a batch, both [B, S] int32, until it is finished; returns the loss."""
        self.state, metrics = self.compiled(self.state, self._place(tokens, targets))
        jax.block_until_ready(self.state)
        return float(metrics["loss"])

    def _place(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, jax.Array]:
        """The batch on the devices: one document a row, each place trained on; what else there is is zero, or false."""
        batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in batch_entries(self._config).items()}
        batch |= {
            "tokens": tokens,
            "targets": targets,
            "segment_ids": np.ones_like(tokens),
            "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
            "loss_mask": np.ones(tokens.shape, np.bool_),
        }
        family = build(self._config.model)
        if isinstance(family, PuzzleFamily):  # targets are classes
            batch["targets"] = targets % family.config.classes
        if "step_targets" in batch:  # every place is asked for every step
            batch["step_targets"] = np.repeat(targets[..., None], self._config.data.difficulty, axis=-1)
        if "visible" in batch:  # all nodes are neighbours
            batch["visible"] = np.ones_like(batch["visible"])
        return jax.device_put(batch, self._rows)


def random_batch(config: Config, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [B, P] int32 of a step, uniform over the vocabulary; one document a row."""
    shape = (config.training.batch_size, config.data.places + 1)
    drawn = np.random.default_rng((config.run.seed, step)).integers(0, config.model.vocab_size, shape, np.int32)
    return np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:])


def bench_train(
    config: Config, steps: int, against: bool, say: Callable[[str], None], profile_to: Path | None = None
) -> Measurement:
    """Time the train step, and with `against` also Hugging Face's Qwen3-MoE, in alternating blocks.

    Args:
        config: model, batch and recipe; its data source isn't opened.
        steps: steps to time, of each side.
        say: gets a line of progress now and then.
        profile_to: a folder for a trace of some further steps.
    Returns:
        `machine`, `ours` (see `_summary`; and `compile_seconds`, `startup_cpu_seconds`: of the process until its first
        step was finished), with `against` also `theirs` and `ratio`, with `profile_to` `operations`
        and `rates`, see `profiling`.
    Raises:
        UserError: the comparison isn't possible, or the step doesn't fit into memory.
    """
    if against:
        qwen3.check_comparable(config)
        qwen3.require_transformers()
    say("compiling the train step ...")
    try:
        ours = OurStep(config)
        ours(*random_batch(config, 0))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError("the train step doesn't fit into memory; use a smaller --training.batch_size") from error
    startup = time.process_time()
    say(f"compiled in {ours.compile_seconds:.1f} s; first step done after {startup:.1f} CPU seconds of the process")

    sides: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"ours": ours}
    result: Measurement = {"machine": machine()}
    if against:
        say("building Qwen3-MoE and choosing its experts' implementation ...")
        theirs, tried = qwen3.fastest_qwen3(config, *random_batch(config, 0))
        sides["theirs"] = theirs
        say("seconds a step: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in tried.items()))
    blocks = _interleave(config, sides, steps, say)

    for name, times in blocks.items():
        result[name] = _summary(config, times)
    result["ours"] |= {"compile_seconds": ours.compile_seconds, "startup_cpu_seconds": startup}
    if against:
        result["theirs"] |= {"experts": theirs.experts, "parameters": theirs.parameters, "tried_seconds": tried}
        result["ratio"] = _ratio(blocks["ours"], blocks["theirs"])
    if profile_to is not None:
        say("tracing three steps ...")
        batch = random_batch(config, 0)
        ours.launch_one_by_one()
        text = ours.compiled.as_text() or ""
        result["operations"], result["rates"] = profiling.profile(lambda: ours(*batch), text, profile_to)
    return result


def machine() -> dict[str, Any]:
    """Versions and devices that a measurement belongs to."""
    versions = {}
    for name in ("jax", "jaxlib", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    return {"device": devices[0].device_kind, "devices": len(devices), "python": platform.python_version()} | versions


Times = list[list[tuple[float, float]]]
"""(wall seconds, CPU seconds of the process) of each step, by block."""


def _interleave(config: Config, sides: dict[str, Callable], steps: int, say: Callable[[str], None]) -> dict[str, Times]:
    """Blocks of steps of each side in turn; who goes first alternates. All sides get the same tokens."""
    for step in range(1, 1 + SETTLING_STEPS):
        for side in sides.values():
            side(*random_batch(config, step))
    blocks: dict[str, Times] = {name: [] for name in sides}
    for first in range(0, steps, TURN):
        order = list(sides) if len(blocks["ours"]) % 2 == 0 else list(sides)[::-1]
        for name in order:
            times = []
            for step in range(first, min(first + TURN, steps)):
                batch = random_batch(config, 1 + SETTLING_STEPS + step)
                wall, cpu = time.perf_counter(), time.process_time()
                sides[name](*batch)
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
            blocks[name].append(times)
        say(
            f"steps {min(first + TURN, steps)}/{steps}: "
            + ", ".join(f"{name} {_median(blocks[name][-1:], 0):.3f} s" for name in sides)
        )
    return blocks


def _median(blocks: Times, column: int) -> float:
    return statistics.median(step[column] for block in blocks for step in block)


def _summary(config: Config, blocks: Times) -> Measurement:
    """Medians over all steps: wall and CPU seconds, tokens/s, model FLOP/s, and MFU where the chip is known.

    Means where depths are drawn: FLOPs are those of a mean step, and draws are skewed."""
    steps = sum(len(block) for block in blocks)
    work = work_of(config, steps)  # a curriculum of depths has come no further
    average = statistics.median if len(work) == 1 else statistics.fmean
    seconds, cpu = (average([step[i] for block in blocks for step in block]) for i in (0, 1))
    tokens = config.training.batch_size * config.data.sequence_length
    flops = config.data.copies * analytic.training_flops(build(config.model), config.data.places, work)[0]
    summary = {
        "steps": steps,
        "average": "mean" if len(work) > 1 else "median",
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens_per_second": tokens / seconds,
        "model_flops_per_second": flops * tokens / seconds,
    }
    utilisation = model_flop_utilisation(config, tokens / seconds, chip_of(jax.devices()[0].device_kind), steps)
    if utilisation is not None:
        summary["model_flop_utilisation"] = utilisation
    return summary


def _ratio(ours: Times, theirs: Times) -> Measurement:
    """Our speed over theirs (above 1: we are faster) by wall and by CPU time: median and range over blocks."""
    result = {}
    for column, name in enumerate(("wall", "cpu")):
        pairs = [_median([b], column) / _median([a], column) for a, b in zip(ours, theirs, strict=True)]
        result[name] = {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs)}
    return result | {"blocks": len(ours)}
