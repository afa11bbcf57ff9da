"""The tables of a frontier study, made from what frontier.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dreamer_jax.studies.frontier import mean_cells, size
from dreamer_jax.studies.published import PUBLISHED

SOLVED = 0.95
"""The share of right answers from which on a task depth counts as solved."""


def fewest_steps(accuracy: Sequence[float]) -> int | None:
    """The thinking steps from which on a task depth is solved, up to the most that were evaluated; None if at no end.

    Args:
        accuracy: after 1, 2, ... steps.
    """
    unsolved = [step for step, share in enumerate(accuracy, start=1) if share < SOLVED]
    first = unsolved[-1] + 1 if unsolved else 1
    return first if first <= len(accuracy) else None


def markdown(result: Mapping[str, Any]) -> str:
    """For every model its accuracy by task depth and steps, means over seeds, and the fewest steps of each seed."""
    unit = PUBLISHED[result["task"]].unit
    blocks = [f"Accuracy, and the fewest steps from which on at least {SOLVED:.0%} are right:"]
    for name, model in result["models"].items():
        blocks.append(f"**{name}**: {model['headline']}, {size(model)}")
        cells = mean_cells(dict(result), name)
        rows = [[str(depth), *map("{:.2f}".format, row)] for depth, row in zip(result["depths"], cells, strict=True)]
        blocks.append(_table([unit, *(f"T = {step}" for step in result["steps"])], rows))
        rows = []
        for seed, its in model["seeds"].items():
            found = [fewest_steps(its["accuracy"][str(depth)]) for depth in result["depths"]]
            rows.append([f"seed {seed}", *("-" if steps is None else str(steps) for steps in found)])
        blocks.append(_table([unit, *map(str, result["depths"])], rows))
    return "\n\n".join(blocks) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))
