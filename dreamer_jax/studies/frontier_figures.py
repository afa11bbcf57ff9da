"""The figures of a frontier study: accuracies beside the paper's, and gradients by thinking step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.analysis.drawing import MAP, Figure
from dreamer_jax.studies.frontier import Result, mean_cells, published_cells, size
from dreamer_jax.studies.published import PUBLISHED

LOWEST = 0.4
"""Accuracy at the dark end of the map, as in the paper."""


def draw(result: Result, folder: Path) -> list[Path]:
    """Write frontier.png and .svg, and gradients.png and .svg where they were measured; returns their paths."""
    names = list(result["models"])
    published = PUBLISHED[result["task"]]
    panels: list[tuple[str, np.ndarray, Any]] = [
        ("the paper", published_cells(result), {"depths": published.trained_depths, "steps": published.trained_steps})
    ]
    for name in names:
        model = result["models"][name]
        panels.append((f"{name}, {size(model)}", mean_cells(result, name), model["trained"]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width, height = 0.55 * len(result["steps"]) + 1.4, 0.3 * len(result["depths"]) + 1.4

    def heat(canvas: Any, theme: dict[str, Any]) -> None:
        for place, (title, cells, trained) in enumerate(panels, 1):
            axes = canvas.add_subplot(rows, columns, place)
            _panel(axes, result, cells, trained)
            axes.set_title(title, fontsize=9)

    figures = [Figure("frontier", "", "", (width * columns, height * rows), heat)]
    norms = {
        name: [seed["gradient_norm"] for seed in result["models"][name]["seeds"].values() if "gradient_norm" in seed]
        for name in names
    }
    if any(norms.values()):
        figures.append(Figure("gradients", "", "", (10, 3.8), lambda canvas, _: _gradients(canvas, norms)))
    return [Path(path) for figure in figures for path in figure.save(folder)]


def _panel(axes: Any, result: Result, cells: np.ndarray, trained: dict[str, Sequence[int] | None]) -> None:
    """A table of accuracies, with dashed lines where training ends; none where what it drew has no ends."""
    depths, steps = result["depths"], result["steps"]
    axes.imshow(cells, aspect="auto", cmap=MAP, vmin=LOWEST, vmax=1, interpolation="nearest")
    for (i, j), share in np.ndenumerate(cells):
        if np.isfinite(share):
            shade = "black" if share > 0.75 else "white"
            axes.text(j, i, f"{share:.2f}", ha="center", va="center", fontsize=7, color=shade)
    for place in borders(steps, trained["steps"]):
        axes.axvline(place, linestyle="--", color="red", linewidth=1)
    for place in borders(depths, trained["depths"]):
        axes.axhline(place, linestyle="--", color="red", linewidth=1)
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    axes.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set(xlabel="thinking steps", ylabel=PUBLISHED[result["task"]].unit)


def borders(ticks: Sequence[int], trained: Sequence[int] | None) -> list[float]:
    """Between which ticks a range begins and ends, as places along the axis; none at the ends of the axis."""
    if trained is None:
        return []
    first, last = trained
    places = [sum(tick < first for tick in ticks), sum(tick <= last for tick in ticks)]
    return [place - 0.5 for place in places if 0 < place < len(ticks)]


def _gradients(canvas: Any, norms: dict[str, list[dict[str, list[float]]]]) -> None:
    """|dD/dH_t| over that of the last step, by t: with fresh weights on the left, after training on the right."""
    from matplotlib import colormaps

    shown = [name for name, seeds in norms.items() if seeds]
    for place, (weights, title) in enumerate({"fresh": "fresh weights", "trained": "after training"}.items(), 1):
        axes = canvas.add_subplot(1, 2, place)
        for number, name in enumerate(shown):
            curve = np.exp(np.mean(np.log([seed[weights] for seed in norms[name]]), axis=0))
            colour = colormaps[MAP](0.9 * number / max(1, len(shown) - 1))
            axes.plot(curve / curve[-1], color=colour, marker="osD^v"[number % 5], markersize=3, label=name)
        axes.set(xlabel="t", ylabel="gradient of the answer with respect to H_t", yscale="log")
        axes.set_title(title, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.5)
    axes.legend()
