"""The tables of a frontier study, made from what frontier.json holds."""

from __future__ import annotations

from collections.abc import Sequence

from dreamer_jax.studies.comparison import markdown_table
from dreamer_jax.studies.frontier import Result, mean_cells, size
from dreamer_jax.studies.published import PUBLISHED

SOLVED = 0.95
"""The share of right answers from which on a task depth counts as solved."""


def fewest_steps(accuracy: Sequence[float]) -> int | None:
    """The thinking steps from which on a task depth stays solved, or None if it isn't solved after the most of them.

    Args:
        accuracy: after 1, 2, ... steps.
    """
    unsolved = [step for step, share in enumerate(accuracy, start=1) if share < SOLVED]
    first = unsolved[-1] + 1 if unsolved else 1
    return first if first <= len(accuracy) else None


def markdown(result: Result) -> str:
    """For every model its accuracy by task depth and steps, means over seeds, and the fewest steps of each seed."""
    unit = PUBLISHED[result["task"]].unit
    blocks = [f"Accuracy, and the fewest steps from which on at least {SOLVED:.0%} are right:"]
    for name, model in result["models"].items():
        blocks.append(f"**{name}**: {model['headline']}, {size(model)}")
        cells = mean_cells(result, name)
        rows = [[str(depth), *map("{:.2f}".format, row)] for depth, row in zip(result["depths"], cells, strict=True)]
        blocks.append(markdown_table([unit, *(f"T = {step}" for step in result["steps"])], rows))
        rows = []
        for seed, its in model["seeds"].items():
            found = [fewest_steps(its["accuracy"][str(depth)]) for depth in result["depths"]]
            rows.append([f"seed {seed}", *("-" if steps is None else str(steps) for steps in found)])
        blocks.append(markdown_table([unit, *map(str, result["depths"])], rows))
    return "\n\n".join(blocks) + "\n"
