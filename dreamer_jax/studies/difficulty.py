"""How often a trained model is right, for every difficulty of a generated task and every depth that it is run at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dreamer_jax.analysis.run_data import data_of
from dreamer_jax.config.sections import Config
from dreamer_jax.data import open_data, tasks
from dreamer_jax.data.puzzles import longest as longest_puzzle
from dreamer_jax.errors import ConfigError
from dreamer_jax.runs.models import TrainedModel
from dreamer_jax.studies.depths import Kept, Measure, Progress, Say
from dreamer_jax.training.evaluation import sums_of_rows

HARDER = 4
"""Difficulties beyond the hardest of training, at most."""
LONGER = 2
"""Harder instances may need rows so many times as long as those of training, and no longer ones."""
ROWS = 32
"""Rows that are computed at once, at most."""

Accuracy = dict[int, dict[int, float]]
"""Difficulty -> depth -> share of the instances whose answers are right."""


def generated(config: Config) -> bool:
    """Whether there is a difficulty to speak of."""
    return config.data.source in ("task", "puzzle")


def difficulties(config: Config) -> list[int]:
    """Those of training, and up to `HARDER` beyond as far as the task has them in rows that aren't much longer."""
    trained = range(easiest(config), hardest(config) + 1)
    found = list(trained)
    for harder in range(trained.stop, trained.stop + HARDER):
        if config.data.source == "task" and harder > tasks.TASKS[config.data.task].hardest:
            break
        if row_length(config, harder) > LONGER * config.data.sequence_length:
            break
        try:
            open_data(_exactly(config, harder, 1))
        except ConfigError:  # the puzzle has none so deep
            break
        found.append(harder)
    return found


def easiest(config: Config) -> int:
    """The easiest instances of training."""
    return 1 if config.data.source == "task" else config.data.puzzle.easiest


def hardest(config: Config) -> int:
    """The hardest ones."""
    return config.data.difficulty if config.data.source == "task" else config.data.puzzle.difficulty


def row_length(config: Config, difficulty: int) -> int:
    """Tokens that a row needs for any instance of a difficulty."""
    if config.data.source == "task":
        return tasks.TASKS[config.data.task].longest(difficulty) + 1
    return longest_puzzle(config.data.puzzle, difficulty)


def accuracy(model: TrainedModel, depths: Sequence[int], instances: int, kept: Kept, say: Say) -> Accuracy:
    """The share of right answers, on instances that no run has been trained on, the same for all runs.

    Args:
        model: of a run on a generated task or puzzle.
        depths: at which it is run.
        instances: of each difficulty.
        kept: gets what is found, and has what is known.
        say: gets lines of progress.
    """
    asked = difficulties(model.config)
    known = kept.part("difficulty", {"instances": instances})
    missing = [(d, depth) for d in asked for depth in depths if f"{d}/{depth}" not in known]
    if missing:
        # All in rows of one length, so that one program serves them all.
        length = max(row_length(model.config, d) for d in asked)
        measure = Measure(_exactly(model.config, asked[-1], instances, length), max(depths))
        progress, batches = Progress(say, "accuracy by difficulty", len(missing)), {}
        for difficulty, depth in missing:
            if difficulty not in batches:
                data = data_of(model, _exactly(model.config, difficulty, instances, length))
                batches = {difficulty: [measure.place(batch) for batch in data.harder_batches()]}
            rows = sums_of_rows(measure.step(depth), lambda batch: batch, model, batches[difficulty])
            share = float(rows["exact"].sum() / max(1, rows["answers"].sum()))
            known[f"{difficulty}/{depth}"] = share
            progress.done(f"difficulty {difficulty} at depth {depth}: {share:.3f}")
        kept.write()
    return {d: {depth: known[f"{d}/{depth}"] for depth in depths} for d in asked}


def _exactly(config: Config, difficulty: int, instances: int, length: int | None = None) -> Config:
    """The configuration whose `harder` instances are those of one difficulty, so many, in rows of a length."""
    length = length or max(row_length(config, each) for each in (difficulty, hardest(config)))
    own: dict[str, Any] = {"sequence_length": length, "heldout_records": instances}
    training = dataclasses.replace(config.training, batch_size=_rows(config, instances, length), microbatches=1)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, **own),
        evaluation=dataclasses.replace(config.evaluation, harder=difficulty),
        training=training,
        mesh=type(config.mesh)(),
    )


def _rows(config: Config, instances: int, length: int) -> int:
    """Rows of a batch: as many as are filled, so that little is computed for nothing."""
    if config.data.source == "puzzle":
        return min(ROWS, instances)
    each = max(1, length // row_length(config, 1))  # of the shortest instances, in a row
    return min(ROWS, -(-instances // each))
