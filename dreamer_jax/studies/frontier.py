"""The computational frontier of "Thinking Deeper, Not Longer": accuracy by task depth and thinking steps.

A study is a folder of ordinary runs, VARIANT/seedN, which `dreamer train` could have made from configs/frontier, and
frontier.json, what came out of them. A killed study goes on where it was: runs from their checkpoints, cells from
those that runs have kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dreamer_jax.config import Config
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, build
from dreamer_jax.json_files import read_object
from dreamer_jax.runs.folders import write_atomically
from dreamer_jax.studies.cells import accuracies, gradient_norms, source_of
from dreamer_jax.studies.jobs import trained
from dreamer_jax.studies.published import PUBLISHED
from dreamer_jax.studies.variants import BASE, Variant, parameters
from dreamer_jax.training.depths import deepest
from dreamer_jax.training.loop import Extras, train

FILE = "frontier.json"
GRADIENT_STEPS = 24
"""T of the gradients by step, or as many as there are depth embeddings."""
FAR_HOPS, FAR_STEPS, SHORTCUT_HOPS = 8, 12, 12
"""Table 1: hops beyond training with enough steps from there on, and hops that a single step can't see."""


class Grid(NamedTuple):
    """The cells of a figure.

    Attributes:
        depths: of the tasks, the rows.
        steps: T, the columns.
    """

    depths: tuple[int, ...]
    steps: tuple[int, ...]


GRIDS = {
    ("graph", "paper"): Grid((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12), PUBLISHED["graph"].steps),
    ("graph", "laptop"): Grid((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12), PUBLISHED["graph"].steps),
    ("boolean", "paper"): Grid(tuple(PUBLISHED["boolean"].accuracy), PUBLISHED["boolean"].steps),
    ("boolean", "laptop"): Grid((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 6, 8, 10, 12)),
    ("family", "paper"): Grid(tuple(PUBLISHED["family"].accuracy), PUBLISHED["family"].steps),
    ("family", "laptop"): Grid((1, 2, 3), (1, 2, 3, 4, 5, 6, 8, 9, 12)),
}
"""(task, preset) -> its cells: the paper's, and for graphs those between them."""

Result = dict[str, Any]


def study(
    task: str,
    preset: str,
    variants: Sequence[Variant],
    seeds: int,
    folder: Path,
    instances: int,
    gradients: bool,
    say: Callable[[str], None],
) -> tuple[Result, int]:
    """Train and evaluate what isn't yet; returns what frontier.json holds, and the exit code of a run that was stopped.

    Args:
        task, preset: which cells.
        variants: the models.
        seeds: runs of each, with seeds from 0.
        folder: of the study.
        instances: for each task depth.
        gradients: whether the norms of gradients by step are asked for as well.
        say: gets lines of progress.

    Raises:
        UserError: the folder holds another study, or a run fails.
    """
    grid = GRIDS[task, preset]
    result = open_result(folder, task, preset, instances)
    for variant in variants:  # what can't be asked is said before anything is trained
        build(variant.loaded.config.model).check_depth(max(grid.steps))
        source_of(variant.loaded.config, grid.depths)
    for variant in variants:
        for seed in range(seeds):
            run = folder / variant.name / f"seed{seed}"
            code = _train(variant, run, seed)
            if code:
                return result, code
            cells = accuracies(run, grid.depths, max(grid.steps), instances, say)
            found: Result = {"accuracy": {str(depth): row for depth, row in cells.items()}}
            if gradients and variant.loaded.config.model.family == BASE:
                found["gradient_norm"] = gradient_norms(run, gradient_steps(variant.loaded.config))
            # Read again: another process may have written its models meanwhile.
            result = open_result(folder, task, preset, instances)
            entry = entry_of(result, variant)
            entry["trained"] = trained_range(variant.loaded.config)
            entry["seeds"].setdefault(str(seed), {}).update(found)
            write_atomically(folder / FILE, json.dumps(result, indent=1) + "\n")
    return result, 0


def open_result(folder: Path, task: str, preset: str, instances: int) -> Result:
    """What a study has come to so far, or a fresh one.

    Raises:
        UserError: the folder holds another.
    """
    grid = GRIDS[task, preset]
    about: Result = {"task": task, "preset": preset, "instances": instances}
    about |= {"depths": list(grid.depths), "steps": list(grid.steps)}
    file = folder / FILE
    if not file.is_file():
        return {**about, "models": {}}
    fix = "remove it; runs that are complete stay, and are measured again"
    before: Result = read_object(file, fix, ("models",))
    models: list[Any] = [*before["models"].values()] if isinstance(before["models"], dict) else [None]
    parts = ("headline", "parameters", "seeds")
    if any(not isinstance(its, dict) or any(part not in its for part in parts) for its in models):
        raise UserError(f"{file} is damaged: a model lacks one of {', '.join(parts)}; {fix}")
    seeds = [its["seeds"] for its in models]
    if not all(isinstance(its, dict) and all(_is_seed(seed, grid.depths) for seed in its.values()) for its in seeds):
        raise UserError(f"{file} is damaged: a seed lacks accuracies; {fix}")
    other = [name for name in about if before.get(name) != about[name]]
    if other:
        said = ", ".join(f"{name} {before.get(name)} instead of {about[name]}" for name in other)
        raise UserError(f"{folder} holds another study: {said}; use another --out")
    return before


def _is_seed(seed: Any, depths: Sequence[int]) -> bool:
    rows = seed.get("accuracy") if isinstance(seed, dict) else None
    return isinstance(rows, dict) and all(isinstance(rows.get(str(depth)), list) for depth in depths)


def entry_of(result: Result, variant: Variant) -> Result:
    """A model's part of the result: what is known of it, or a fresh one where that is of another model of its name,
    whose runs were removed since."""
    known, fresh = result["models"].get(variant.name), describe(variant.loaded.config)
    if known is None or any(known[name] != fresh[name] for name in ("headline", "parameters")):
        known = result["models"][variant.name] = fresh
    return known


def describe(config: Config) -> Result:
    """What a model is, for the result."""
    return {"headline": build(config.model).headline(), "parameters": parameters(config), "seeds": {}}


def size(model: Result) -> str:
    """A model's parameters and runs, in words."""
    seeds = len(model["seeds"])
    return f"{model['parameters']:,} parameters, {seeds} seed{'s' if seeds > 1 else ''}"


def trained_range(config: Config) -> dict[str, list[int] | None]:
    """The task depths and thinking steps of training, from and to; None of steps that are drawn from a long tail."""
    puzzle, recurrence, model = config.data.puzzle, config.recurrence, build(config.model)
    most = deepest(recurrence, model)
    least: int | None = {"fixed": most, "uniform": recurrence.least}.get(recurrence.draw)
    if recurrence.draw == "model":
        most, alike = model.depth, type(model).draw is Family.draw
        least = most if alike else getattr(config.model, "depth_min", None)
    steps = None if least is None else [least, most]
    return {"depths": [puzzle.easiest, puzzle.difficulty], "steps": steps}


def gradient_steps(config: Config) -> int:
    """T of the gradients by step: as many as there are depth embeddings, where there are some."""
    model: Any = config.model
    return min(GRADIENT_STEPS, model.max_depth) if model.depth_embedding_std else GRADIENT_STEPS


def _train(variant: Variant, run: Path, seed: int) -> int:
    """Train a run to its end, or go on with it; returns the exit code."""
    loaded = variant.with_run(run, seed)
    return 0 if trained(loaded) else train(loaded, Extras())


def mean_cells(result: Result, name: str) -> np.ndarray:
    """[depths, steps]: the accuracies of a model, on average over seeds; as many steps as were evaluated."""
    of_seeds = [
        [seed["accuracy"][str(depth)] for depth in result["depths"]]
        for seed in result["models"][name]["seeds"].values()
    ]
    table = np.array(of_seeds).mean(axis=0)
    return table[:, [step - 1 for step in result["steps"]]]


def published_cells(result: Result) -> np.ndarray:
    """[depths, steps]: the paper's numbers, where it has them; NaN elsewhere."""
    published = PUBLISHED[result["task"]]
    table = np.full((len(result["depths"]), len(result["steps"])), np.nan)
    for i, depth in enumerate(result["depths"]):
        for j, step in enumerate(result["steps"]):
            if depth in published.accuracy and step in published.steps:
                table[i, j] = published.accuracy[depth][published.steps.index(step)]
    return table


def supervision(result: Result, name: str) -> dict[str, float]:
    """Table 1's numbers of a model for graphs: `shortcut`, of 12 hops after one step; `far`, of 8 hops from 12 steps
    on."""
    cells = mean_cells(result, name)
    rows = {depth: cells[i] for i, depth in enumerate(result["depths"])}
    enough = np.array(result["steps"]) >= FAR_STEPS
    return {"shortcut": float(rows[SHORTCUT_HOPS][0]), "far": float(rows[FAR_HOPS][enough].mean())}
