"""The figure of a study, in the manner of Fig. 3: means over seeds as lines, their ranges as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.analysis.drawing import Figure
from dreamer_jax.evaluation.comparison import Curve, average
from dreamer_jax.studies.comparison import depth_means, rows_of, seeds_of, swept_values
from dreamer_jax.studies.study_file import LOSS


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write study_TASK.png and .svg for each task that has complete runs; returns their paths."""
    paths = []
    for name, task in result["tasks"].items():
        if any(member["seeds"] for member in task["members"].values()):
            panels = _panels(result, name)
            size = (11, 3.75 * ((len(panels) + 1) // 2))
            drawn = Figure(f"study_{name}", "", "", size, lambda canvas, _, panels=panels: _lay_out(canvas, panels))
            paths += drawn.save(folder)
    return [Path(path) for path in paths]


def _panels(result: Mapping[str, Any], name: str) -> list[Callable[[Any], None]]:
    """Of a task: curves over tokens and FLOPs; loss by depth and by swept value, where there are several; costs."""
    task = result["tasks"][name]
    members = {its: member for its, member in task["members"].items() if member["seeds"]}
    # Tableau's ten colours, then the same dashed: a study of more than ten stays readable.
    looks = {its: {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"} for i, its in enumerate(members)}
    rows = [row for row in rows_of(result, name) if row["member"] in members]
    metric = task["metric"]
    panels: list[Callable[[Any], None]] = [
        lambda axes: _curve_panel(axes, members, looks, metric, by_flops=False),
        lambda axes: _curve_panel(axes, members, looks, metric, by_flops=True),
    ]
    if any(len(depth_means(member)) > 1 for member in members.values()):
        panels.append(lambda axes: _depth_panel(axes, members, looks))
    if any(len(member.get("swept", ())) > 1 for member in members.values()):
        panels.append(lambda axes: _sweep_panel(axes, members, looks))
    return [*panels, lambda axes: _cost_panel(axes, rows, looks)]


def _lay_out(canvas: Any, panels: list[Callable[[Any], None]]) -> None:
    """Two panels a row; the names stand in the last place where it is empty, else in the first panel."""
    places = canvas.subplots((len(panels) + 1) // 2, 2).flat
    for axes, draw_panel in zip(places, panels, strict=False):
        draw_panel(axes)
        axes.grid(alpha=0.3)
    names = {"handles": places[0].lines, "frameon": False, "fontsize": 7, "ncol": 2}
    if len(panels) % 2:
        places[-1].axis("off")
        places[-1].legend(loc="center", **names)
    else:
        places[0].legend(**names)


def _curve_panel(axes: Any, members: Mapping[str, Any], looks: Mapping[str, Any], metric: str, by_flops: bool) -> None:
    """The metric over tokens, or over FLOPs."""
    for name, member in members.items():
        curves = [run.curve for run in seeds_of(member, metric)]
        _band(axes, curves, metric, member["training_flops_per_token"] if by_flops else 1.0, looks[name], name)
    label = "held-out loss (nats per token)" if metric == LOSS else f"{metric} accuracy"
    axes.set(xlabel="training FLOPs" if by_flops else "training tokens", ylabel=label)


def _depth_panel(axes: Any, members: Mapping[str, Any], looks: Mapping[str, Any]) -> None:
    """Held-out loss by depth, the trained depth marked."""
    for name, member in members.items():
        means = dict(sorted(depth_means(member).items()))
        _marked(axes, list(means), list(means.values()), member["depth"], looks[name])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="depth at evaluation (square: trained)", ylabel="held-out loss")


def _sweep_panel(axes: Any, members: Mapping[str, Any], looks: Mapping[str, Any]) -> None:
    """Held-out loss at the end of a sweep's runs, the value that went on marked; values as far apart as their order."""
    swept = {name: member for name, member in members.items() if member.get("swept")}
    values = swept_values(swept.values())
    for name, member in swept.items():
        ((_, chosen),) = member["chosen"].items()
        tried = [value for value in values if value in member["swept"]]
        places = [values.index(value) for value in tried]
        ends = [math.nan if member["swept"][value] is None else member["swept"][value] for value in tried]
        _marked(axes, places, ends, values.index(chosen), looks[name])
    axes.set_xticks(range(len(values)), values)
    keys = dict.fromkeys(key for member in swept.values() for key in member["chosen"])
    axes.set(xlabel=f"{', '.join(keys)} (square: chosen)", ylabel="held-out loss at the end of its run")


def _marked(axes: Any, x: list[int], y: list[float], mark: int, look: dict[str, Any]) -> None:
    """A line through points, with a square at one of them."""
    axes.plot(x, y, marker="o", markersize=3, **look)
    if mark in x:
        axes.plot(mark, y[x.index(mark)], marker="s", color=look["color"])


def _band(axes: Any, curves: list[Curve], metric: str, scale: float, look: dict[str, Any], name: str) -> None:
    """A line through the means, and the range of the seeds."""
    sign = -1.0 if metric == LOSS else 1.0
    mean = average(curves) if curves else []
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
