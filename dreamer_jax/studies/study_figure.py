"""The figure of a study, in the manner of Fig. 3: means over seeds as lines, their ranges as bands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.analysis.drawing import Figure
from dreamer_jax.evaluation.comparison import Curve, average
from dreamer_jax.studies.comparison import depth_means, rows_of, seeds_of
from dreamer_jax.studies.study_file import LOSS


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write study_TASK.png and .svg for each task that has complete runs; returns their paths."""
    paths = []
    for name, task in result["tasks"].items():
        if any(member["seeds"] for member in task["members"].values()):
            figure = Figure(
                f"study_{name}", "", "", (11, 7.5), lambda canvas, _, name=name: _panels(canvas, result, name)
            )
            paths += figure.save(folder)
    return [Path(path) for path in paths]


def _panels(canvas: Any, result: Mapping[str, Any], name: str) -> None:
    task = result["tasks"][name]
    members = {its: member for its, member in task["members"].items() if member["seeds"]}
    # Tableau's ten colours, then the same dashed: a study of more than ten stays readable.
    looks = {its: {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"} for i, its in enumerate(members)}
    metric = task["metric"]
    label = "held-out loss (nats per token)" if metric == LOSS else f"{metric} accuracy"
    tokens, flops, depths, costs = canvas.subplots(2, 2).flat
    for its, member in members.items():
        curves = [run.curve for run in seeds_of(member, metric)]
        _band(tokens, curves, metric, 1.0, looks[its], its)
        _band(flops, curves, metric, member["training_flops_per_token"], looks[its], its)
        means = dict(sorted(depth_means(member).items()))
        if means:
            depths.plot(list(means), list(means.values()), marker="o", markersize=3, **looks[its])
            if member["depth"] in means:
                depths.plot(member["depth"], means[member["depth"]], marker="s", color=looks[its]["color"])
    tokens.set(xlabel="training tokens", ylabel=label)
    flops.set(xlabel="training FLOPs", ylabel=label)
    depths.set_xscale("log", base=2)
    depths.xaxis.set_major_formatter("{x:.0f}")
    depths.set(xlabel="depth at evaluation (square: trained)", ylabel="held-out loss")
    _cost_panel(costs, [row for row in rows_of(result, name) if row["member"] in members], looks)
    for axes in (tokens, flops, depths):
        axes.grid(alpha=0.3)
    tokens.legend(frameon=False, fontsize=7, ncol=2)


def _band(axes: Any, curves: list[Curve], metric: str, scale: float, look: dict[str, Any], name: str) -> None:
    """A line through the means, and the range of the seeds."""
    sign = -1.0 if metric == LOSS else 1.0
    mean = average(curves)
    if not mean:
        return
    x = np.array([tokens for tokens, _ in mean]) * scale
    values = sign * np.array([[dict(curve)[tokens] for tokens, _ in mean] for curve in curves])
    axes.plot(x, values.mean(axis=0), label=name, linewidth=1.4, **look)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.15, linewidth=0)


def _cost_panel(axes: Any, rows: list[dict[str, Any]], looks: Mapping[str, Any]) -> None:
    """Speed over the memory of a generated sequence; names that would overlap stand on both sides of their points."""
    most = [max(row[key] for row in rows) for key in ("memory_bytes", "tokens_per_second")]
    below, left = -np.inf, False
    for row in sorted(rows, key=lambda row: row["tokens_per_second"]):
        speed = row["tokens_per_second"]
        left = not left and speed - below < 0.04 * most[1]
        below = speed
        place = (row["memory_bytes"] / 2**20, speed)
        axes.plot(*place, marker="o", color=looks[row["member"]]["color"])
        side = {"xytext": (-5, 0), "ha": "right"} if left else {"xytext": (5, 0), "ha": "left"}
        axes.annotate(row["member"], place, textcoords="offset points", va="center", fontsize=7, **side)
    axes.set(xlabel="memory of weights and caches (MiB)", ylabel="training tokens/s")
    axes.set_xlim(0, 1.3 * most[0] / 2**20)  # both from zero, or members of one cost would seem to differ
    axes.set_ylim(0, 1.1 * most[1])
    axes.grid(alpha=0.3)
