"""The figures of samplers: speed against agreement and accuracy, as Fig. 5 to 8 of "Efficient parallel samplers"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.analysis.drawing import Figure

LOOKS = (("o", "-"), ("s", "--"), ("^", ":"))
"""Marker and dash of each share: accuracies, then agreement."""


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg for each setting that was varied and measured; returns their paths.

    Args:
        found: of `bench_samplers`, with `grids`: name -> value, others and label of each point.
        folder: exists.
    """
    paths = []
    for name, points in found["grids"].items():
        batches = found["batches"].values()
        measured = [point for point in points if all(point["label"] in sides for sides in batches)]
        if measured:
            width = 4.2 * (1 + len(found["batches"]))
            figure = Figure(
                name,
                "",
                "",
                (width, 3.8),
                lambda canvas, theme, name=name, its=measured: _panels(canvas, theme, found, name, its),
            )
            paths += figure.save(folder)
    return [Path(path) for path in paths]


def _panels(canvas: Any, theme: Mapping[str, Any], found: Mapping[str, Any], name: str, points: Sequence[Any]) -> None:
    """Sequential steps on the left, then tokens a second at each batch size."""
    panels = canvas.subplots(1, 1 + len(found["batches"]), sharey=True, squeeze=False)[0]
    last = list(found["batches"].values())[-1]
    full = next(iter(last.values()))["steps"]
    _panel(panels[0], theme, last, points, lambda side: full / side["steps"] if full and side["steps"] else math.nan)
    panels[0].set(xlabel="speed-up in steps that follow one another", ylabel="share")
    for axes, (batch, sides) in zip(panels[1:], found["batches"].items(), strict=True):
        _panel(axes, theme, sides, points, lambda side: side["speedup"] or math.nan)
        axes.set(xlabel=f"speed-up in tokens a second, batch {batch}")
    lowest = min(share for point in points for _, share in _values(last[point["label"]]))
    panels[0].set_ylim(min(lowest, 0.8) - 0.05, 1.05)
    panels[0].legend(fontsize=7, title=name, title_fontsize=8)


def _panel(axes: Any, theme: Mapping[str, Any], sides: Mapping[str, Any], points: Sequence[Any], speed: Any) -> None:
    """A line for each curve and share; each point has its value beside it, and a cross is full depth."""
    full = next(iter(sides.values()))
    curves = list(dict.fromkeys(point["others"] for point in points))
    for share, (marker, dash) in zip(_shares(full), LOOKS, strict=False):
        for number, others in enumerate(curves):
            own = [(point["value"], sides[point["label"]]) for point in points if point["others"] == others]
            x, y = zip(*((speed(side), dict(_values(side))[share]) for _, side in own), strict=True)
            colour = theme["lines"][number % len(theme["lines"])]
            label = ", ".join(filter(None, (share, others)))
            axes.plot(x, y, dash, marker=marker, color=colour, markersize=4, label=label)
            for (value, _), place in zip(own, zip(x, y, strict=True), strict=True):
                axes.annotate(value, place, (3, 4), textcoords="offset points", fontsize=7, color=colour)
        axes.plot(1, dict(_values(full))[share], "x", color=theme["text"], markersize=7)
    axes.grid(alpha=0.5)


def _values(side: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, share) of the accuracies and of agreement."""
    yield from ((name, its["value"]) for name, its in side["accuracy"].items())
    yield "agreement", side["agreement"]


def _shares(side: Mapping[str, Any]) -> list[str]:
    return [name for name, _ in _values(side)]
