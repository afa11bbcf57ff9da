"""Held-out loss, perplexity and exact match."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dreamer_jax.data import Data
from dreamer_jax.data.records import Batch
from dreamer_jax.json_files import read_lines

FILE = "heldout.jsonl"
"""What a run keeps of its evaluations beside their means: a line of `Sums` for each, which later lines of its step
replace."""
PARTS = 32
"""Into which held-out rows are dealt."""

Sums = dict[str, list[float]]
"""`loss`, `targets`, `exact` and `answers` (see `make_evaluation_step`) over each of `PARTS` parts of held-out rows.

Parts are what a comparison of runs draws anew to say how much of it hangs on the records that were held out.
"""


class Weights(Protocol):
    """What is evaluated: a training state, or a trained model."""

    @property
    def params(self) -> Any:
        """float32 parameters."""

    @property
    def model_state(self) -> Any:
        """The model's own, by collection."""


class Evaluation(NamedTuple):
    """What came out of one.

    Attributes:
        metrics: `heldout/loss`, `heldout/perplexity`, `heldout/exact_match` and the same for `harder/`; a kind without
            batches is left out.
        parts: of the held-out rows; empty without any.
    """

    metrics: dict[str, float]
    parts: Sums


def evaluate(evaluation_step: Callable[..., Any], place: Callable, state: Weights, data: Data) -> Evaluation:
    """Metrics over the held-out batches, and over the harder ones where the configuration asks for them.

    Args:
        evaluation_step: see `make_evaluation_step`.
        place: puts a batch on the devices.
    """
    metrics: dict[str, float] = {}
    parts: Sums = {}
    for kind, batches in (("heldout", data.heldout_batches()), ("harder", data.harder_batches())):
        rows = sums_of_rows(evaluation_step, place, state, batches)
        if not rows:
            continue
        sums = {name: float(its.sum()) for name, its in rows.items()}
        if not sums["targets"]:
            continue
        loss = sums["loss"] / sums["targets"]
        metrics[f"{kind}/loss"] = loss
        metrics[f"{kind}/perplexity"] = math.exp(min(loss, 700.0))
        if sums["answers"]:
            metrics[f"{kind}/exact_match"] = sums["exact"] / sums["answers"]
        if kind == "heldout":
            parts = {name: _dealt(its) for name, its in rows.items()}
    return Evaluation(metrics, parts)


def sums_of_rows(
    evaluation_step: Callable[..., Any], place: Callable, state: Weights, batches: Iterable[Batch]
) -> dict[str, np.ndarray]:
    """What the evaluation step says of the rows of all batches, one after the other, float64; empty without any."""
    found = [
        {
            name: np.asarray(its, np.float64)
            for name, its in evaluation_step(state.params, state.model_state, placed).items()
        }
        for placed in map(place, batches)
    ]
    return {name: np.concatenate([its[name] for its in found]) for name in found[0]} if found else {}


def _dealt(rows: np.ndarray) -> list[float]:
    sums = np.bincount(np.arange(len(rows)) % PARTS, weights=rows, minlength=PARTS)
    return [round(float(its), 4) for its in sums]


def keep_parts(run: Path, step: int, parts: Sums) -> None:
    """Add a line to `FILE`; a disk that is full loses it."""
    try:
        with (run / FILE).open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"step": step, **parts}))  # whatever a kill has left of the line before
    except OSError:
        pass


def kept_parts(run: Path) -> dict[int, Sums]:
    """Step -> what `keep_parts` wrote of it last; a line cut short by a kill is left out."""
    found = {parts.pop("step"): parts for parts in read_lines(run / FILE) if "step" in parts}
    return dict(sorted(found.items()))
