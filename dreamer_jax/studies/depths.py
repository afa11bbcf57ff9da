"""What a trained model's held-out loss becomes when it runs at other depths than the trained one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dreamer_jax.analysis.run_data import data_of
from dreamer_jax.config.sections import Config, MeshConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family
from dreamer_jax.json_files import AGAIN, read_object
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.runs.folders import run_and_step, write_atomically
from dreamer_jax.runs.models import TrainedModel, load_run
from dreamer_jax.training.evaluation import evaluate
from dreamer_jax.training.train_step import make_evaluation_step

FILE = "depth.json"
FARTHEST = 4
"""Times the trained depth, up to which models are run that take any depth."""
SECONDS, LATER = 2.0, 10.0
"""Until the first line of progress, and between two."""

Say = Callable[[str], None]
ByDepth = dict[int, dict[str, float]]
"""Depth -> loss, perplexity, and exact match where answers are known."""


def open_run(run: Path) -> tuple[TrainedModel, Kept]:
    """The newest checkpoint of a run, and what its `FILE` has of it. To be opened once for all that is asked: a run in
    training saves others meanwhile.

    Raises:
        UserError: there is none, or the path names something else.
    """
    if re.match("[a-z0-9]+:/", str(run)):  # Path makes one slash of two
        written = str(run).replace(":/", "://", 1)
        raise UserError(
            f"{written}: files are written into the run directory, so it has to be on a disk; copy it first"
        )
    if run_and_step(run)[1] is not None:
        raise UserError(f"{run}: name the run directory; its newest checkpoint is taken")
    model = load_run(run)
    return model, Kept(run / FILE, model.step, model.digest)


def check_writable(run: Path) -> None:
    """Before anything is computed.

    Raises:
        UserError: nothing can be written into the run.
    """
    if not os.access(run, os.W_OK):
        raise UserError(f"{run}: files are written into the run directory, and this can't be written; copy it first")


def heldout(run: Path, model: TrainedModel, depths: Sequence[int], kept: Kept, say: Say) -> ByDepth:
    """Held-out metrics at these depths, in order. What isn't known yet is computed on one device, by one program for
    all, and kept.

    Raises:
        UserError: nothing is held out, or the run can't be written into.
    """
    known = kept.part("depths")
    missing = [depth for depth in depths if str(depth) not in known]
    if missing:
        check_writable(run)
        config = dataclasses.replace(model.config, evaluation=dataclasses.replace(model.config.evaluation, harder=0))
        data, measure = data_of(model, config), Measure(config, max(missing))
        progress = Progress(say, "held-out loss", len(missing))
        for depth in missing:
            metrics, _ = evaluate(measure.step(depth), measure.place, model, data)
            found = {name.removeprefix("heldout/"): value for name, value in metrics.items() if "heldout/" in name}
            if not found:
                raise UserError(f"{run} has no held-out records; see data.heldout_records and data.heldout_path")
            known[str(depth)] = found
            kept.write()
            progress.done(f"depth {depth}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return {depth: known[str(depth)] for depth in depths}


def usual_depths(family: Family) -> list[int]:
    """1, 2, 4, ... and the trained depth; beyond it only where the model takes any depth."""
    found = {family.depth}
    depth = 1
    while depth <= FARTHEST * family.depth:
        if depth == family.depth or takes(family, depth):
            found.add(depth)
        depth *= 2
    return sorted(found)


def takes(family: Family, depth: int) -> bool:
    """Whether a model can be run at a depth."""
    try:
        family.check_depth(depth)
    except UserError:
        return False
    return True


def checked(family: Family, depths: Sequence[int]) -> list[int]:
    """The depths in order, if the model takes all of them.

    Raises:
        UserError: it doesn't.
    """
    for depth in depths:
        family.check_depth(depth)
    return sorted(set(depths))


class Measure:
    """The evaluation of batches at any depth up to a bound, on one device.

    Args:
        config: of the run, with the shapes of the batches.
        deepest: the bound.
    """

    def __init__(self, config: Config, deepest: int):
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self._step = make_evaluation_step(dataclasses.replace(config, mesh=MeshConfig()), mesh, deepest)
        self._sharding = NamedSharding(mesh, batch_spec(mesh))

    def step(self, depth: int) -> Callable[..., Any]:
        """The evaluation step of one depth."""
        return lambda params, model_state, batch: self._step(params, model_state, batch, np.int32(depth))

    def place(self, batch: Any) -> Any:
        """A batch on the device."""
        return jax.device_put(batch, self._sharding)


class Kept:
    """What is known of a checkpoint at several depths, in a file of its run.

    Args:
        file: JSON; what it has of another checkpoint is forgotten.
        step: the checkpoint.
        digest: of its weights; "" where they aren't at hand, and the step alone must do.
    """

    def __init__(self, file: Path, step: int, digest: str = ""):
        self._file = file
        self._content: dict[str, Any] = {"step": step, "weights": digest}
        if file.is_file():
            before = read_object(file)
            parts = {name: part for name, part in before.items() if name not in ("step", "weights")}
            if any(not isinstance(part, dict) for part in parts.values()):
                raise UserError(f"{file} is damaged: a part of it isn't an object; {AGAIN}")
            if not all(_numbers(its) and "loss" in its for its in parts.get("depths", {}).values()):
                raise UserError(f"{file} is damaged: what it has of a depth isn't numbers by name; {AGAIN}")
            for name, fits in {"agreement": _is_number, "difficulty": _is_number, "passes": _is_pass}.items():
                found = parts.get(name, {}).get("found", {})
                if not (isinstance(found, dict) and all(map(fits, found.values()))):
                    raise UserError(f"{file} is damaged: its part {name} has something else; {AGAIN}")
            if before.get("step") == step and (not digest or before.get("weights") == digest):
                self._content = before

    def part(self, name: str, settings: Any = None) -> dict[str, Any]:
        """A part, to be filled: name of what -> what. Of one that was made with other settings nothing is left."""
        if settings is None:
            return self._content.setdefault(name, {})
        its = self._content.get(name, {})
        if its.get("settings") != settings or not isinstance(its.get("found"), dict):
            self._content[name] = {"settings": settings, "found": {}}
        return self._content[name]["found"]

    def write(self) -> None:
        """Write the file; depths in order."""
        for part in self._content.values():
            its = part.get("found", part) if isinstance(part, dict) else {}
            ordered = {name: its[name] for name in sorted(its, key=_number)}
            its.clear()
            its.update(ordered)
        write_atomically(self._file, json.dumps(self._content, indent=1) + "\n")


def _numbers(found: Any) -> bool:
    """Whether something is name -> number."""
    return isinstance(found, dict) and all(map(_is_number, found.values()))


def _is_number(found: Any) -> bool:
    return isinstance(found, int | float)


def _is_pass(found: Any) -> bool:
    """Whether something has what `depth_report.look_into` writes of a pass."""
    lists = ("needed", "norm", "residual")
    if not (isinstance(found, dict) and all(isinstance(found.get(name), list) for name in lists)):
        return False
    radius = found.get("spectral_radius")
    return isinstance(radius, dict) and all(isinstance(radius.get(name), list) for name in ("depths", "mean"))


def _number(name: str) -> tuple[int, ...]:
    """Sorts names that are numbers, or several with a slash between them; others stay in their order."""
    parts = name.split("/")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


class Progress:
    """Lines for somebody who waits: what begins, after two seconds how far it is, and then every ten.

    Args:
        say: gets a line.
        what: is done.
        count: of its parts.
    """

    def __init__(self, say: Say, what: str, count: int):
        self._say, self._what, self._count, self._done = say, what, count, 0
        self._next = time.monotonic() + SECONDS
        say(f"{what}: {count} to compute")

    def done(self, line: str) -> None:
        """One part is done, of which this can be said."""
        self._done += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LATER
            self._say(f"{self._what}: {self._done} of {self._count}, {line}")
