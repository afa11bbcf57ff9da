"""How often a trained model is right, for every task depth and every number of thinking steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.config import Config
from dreamer_jax.data.puzzles import PuzzleSource, longest
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, depth_of, forward, initialise
from dreamer_jax.families.puzzles import PuzzleFamily, labels, logits_by_depth
from dreamer_jax.json_files import AGAIN, read_object
from dreamer_jax.runs.folders import write_atomically
from dreamer_jax.runs.models import TrainedModel, load_run

ROWS = 250
"""Instances that are computed at once."""
FILE = "cells.json"

Accuracy = dict[int, list[float]]
"""Task depth -> the share of instances that are right after 1, 2, ... thinking steps."""


def accuracies(run: Path, depths: Sequence[int], steps: int, instances: int, say: Callable[[str], None]) -> Accuracy:
    """The cells of a run, which are kept in it (`FILE`), so that none is computed twice.

    Args:
        run: a run directory.
        depths: of the tasks.
        steps: the most thinking steps; one pass so deep gives the answers after every step.
        instances: for each depth, held out from training and the same for all runs.
        say: gets a line of progress for each depth.
    """
    model = load_run(run)
    known = {"step": model.step, "weights": model.digest, "steps": steps, "instances": instances, "accuracy": {}}
    file = run / FILE
    if file.is_file():
        before = read_object(file)
        if {**before, "accuracy": {}} == known:
            kept = before.get("accuracy")
            rows = list(kept.values()) if isinstance(kept, dict) else [None]
            if any(not isinstance(row, list) or len(row) != steps for row in rows):
                raise UserError(f"{file} is damaged: a depth hasn't {steps} accuracies; {AGAIN}")
            known = before
    found: dict[str, list[float]] = known["accuracy"]
    missing = [depth for depth in depths if str(depth) not in found]
    source = source_of(model.config, missing)
    for depth in missing:
        found[str(depth)] = _cell(model, source, depth, steps, instances)
        write_atomically(file, json.dumps(known) + "\n")
        say(f"{run}: depth {depth}: " + " ".join(f"{share:.2f}" for share in found[str(depth)]))
    return {depth: found[str(depth)] for depth in depths}


def source_of(config: Config, depths: Sequence[int]) -> PuzzleSource | None:
    """Instances of all depths, in rows of one length, so that one program takes them all.

    Raises:
        UserError: the task of the configuration has no instances of such a depth.
    """
    puzzle = config.data.puzzle
    if not depths:
        return None
    source = PuzzleSource(puzzle, max(longest(puzzle, depth) for depth in (*depths, puzzle.difficulty)))
    for depth in depths:
        source.check(depth, "data.puzzle.difficulty")
    return source


def _cell(model: TrainedModel, source: PuzzleSource | None, depth: int, steps: int, instances: int) -> list[float]:
    assert source is not None
    right = np.zeros(steps, np.int64)
    for first in range(0, instances, ROWS):
        batch = source.cell(depth, range(first, min(first + ROWS, instances)), min(ROWS, instances))
        right += np.asarray(_count_right(model.family, steps)(model.params, model.model_state, batch))
    return (right / instances).tolist()


@functools.lru_cache(maxsize=4)
def _count_right(family: Family, steps: int) -> Callable[..., jax.Array]:
    """The jitted (params, model state, batch) -> [T] int32, the rows that are right after each step."""
    family.check_depth(steps)
    answering = puzzle_family(family)

    def count(params: Any, model_state: Any, batch: Any) -> jax.Array:
        logits = logits_by_depth(answering, family.cast(params), model_state, batch, steps)
        label, counted = labels(batch)
        return jnp.sum((jnp.argmax(logits, axis=-1) == label) & counted, axis=-1, dtype=jnp.int32)

    return jax.jit(count)


def gradient_norms(run: Path, steps: int, instances: int = 64) -> dict[str, list[float]]:
    """|dD/dH_t| for t = 0..T, D being the difference of the two logits after T steps: how much every step still
    matters.

    The loss would not do: its gradient vanishes wherever a model is sure.

    Args:
        run: a run directory.
        steps: T.
        instances: of the deepest task that was trained, over which the norms are averaged.

    Returns:
        `fresh`, with the weights that the run started from, and `trained`, [T + 1] each.
    """
    model = load_run(run)
    family, puzzle = puzzle_family(model.family), model.config.data.puzzle
    source = PuzzleSource(puzzle, longest(puzzle, puzzle.difficulty))
    batch = source.cell(puzzle.difficulty, range(instances), instances)
    fresh, state = initialise(family, jax.random.key(model.config.run.seed))
    norms = jax.jit(functools.partial(_gradient_norms, family, steps))
    weights = {"fresh": (fresh, state), "trained": (model.params, model.model_state)}
    return {name: np.asarray(norms(*its, batch)).tolist() for name, its in weights.items()}


def _gradient_norms(family: PuzzleFamily, steps: int, params: Any, model_state: Any, batch: Any) -> jax.Array:
    """[T + 1]: the backward pass step by step, which a depth scan doesn't show."""
    passed = forward(family, params, model_state, batch, 1)
    rows, length = batch["tokens"].shape
    entered, memory = family.enter(params, batch, family.fresh(rows, length, steps), passed.context)
    weights, inputs = family.weights(family.prepare(params, model_state)), family.inputs(entered)

    def step(state: Any, l: jax.Array) -> Any:
        depth = depth_of(l, steps)
        return family.step(weights.at(l), state, inputs, depth, memory, passed.context).state

    def difference(state: Any) -> jax.Array:
        logits = family.class_logits(params, state, passed.memory, passed.context)
        return jnp.sum(logits[:, 1] - logits[:, 0])

    def back(gradient: Any, at: Any) -> tuple[Any, jax.Array]:
        state, l = at
        return jax.vjp(lambda state: step(state, l), state)[1](gradient)[0], norm(gradient)

    def norm(gradient: Any) -> jax.Array:
        by_row = family.stream(gradient).reshape(rows, -1)  # a sum over rows, which don't mix
        return jnp.mean(jnp.linalg.norm(by_row, axis=-1))

    numbers, start = jnp.arange(steps), family.start(entered, passed.context)
    last, states = jax.lax.scan(lambda state, l: (step(state, l), state), start, numbers)
    first, norms = jax.lax.scan(back, jax.grad(difference)(last), (states, numbers), reverse=True)
    return jnp.concatenate([norm(first)[None], norms])


def puzzle_family(family: Family) -> PuzzleFamily:
    """The model, if it answers puzzles."""
    if not isinstance(family, PuzzleFamily):
        raise UserError(f"models of the family {family.config.family} don't answer puzzles; see docs/frontier.md")
    return family
