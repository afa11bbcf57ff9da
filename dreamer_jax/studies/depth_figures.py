"""The figures of `dreamer depth`: curves over depths, and what happens within single passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dreamer_jax.analysis.drawing import MAP, MARKERS, Figure

TITLES = {
    "depth_loss": "Held-out loss, and how many answers stay",
    "depth_difficulty": "Harder instances at more depth",
    "depth_needed": "How many depths a token needs",
    "depth_within": "What a step does to the state",
}
TEXTS = {
    "depth_loss": (
        "Each point is a pass of its own, of all held-out records; the dashed line is the depth of training. Left: the "
        "loss. Right: agreement, the share of targets whose likeliest token is the one at the trained depth, and exact "
        "match where answers are known."
    ),
    "depth_difficulty": (
        "Share of right answers by difficulty (vertical) and depth (horizontal), over new instances that no run has "
        "been trained on. The vertical line is the trained depth, the horizontal one ends what was trained on. "
        "What is bright above and to the right of their crossing is harder than in training and solved by more depth."
    ),
    "depth_needed": (
        "The likeliest token is read out after every depth of a pass. A target needs as many depths as it takes until "
        "that token stays what it is at the end. Bars at the left are targets that are settled early; a bar at the "
        "very end are those that the last depth still changed. Where a model halts by itself the line says when; at "
        "the last depth some models halt all that still run."
    ),
    "depth_within": (
        "Left: the length of the stream after each depth, mean over tokens. Middle: how far a step moves it, "
        "|x' - x| / |x|. Right: the spectral radius of the step's Jacobian where the pass is at that depth, mean over "
        "rows, with their range: below 1 a small error dies out if the step goes on like this, above 1 it grows."
    ),
}


def make_figures(result: Mapping[str, Any]) -> list[Figure]:
    """The figures that apply to a report, see `studies.depth_report.report`."""
    draws = {
        "depth_loss": ((9, 3.4), lambda canvas, theme: _loss(canvas, theme, result)),
        "depth_difficulty": ((7.5, 3.8), lambda canvas, theme: _difficulty(canvas, result)),
        "depth_needed": ((9, 3.4), lambda canvas, theme: _needed(canvas, theme, result)),
        "depth_within": ((11, 3.4), lambda canvas, theme: _within(canvas, theme, result)),
    }
    if "difficulty" not in result:
        del draws["depth_difficulty"]
    return [Figure(name, TITLES[name], TEXTS[name], size, draw) for name, (size, draw) in draws.items()]


def _loss(canvas: Any, theme: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    by_depth = {int(depth): its for depth, its in result["depths"].items()}
    depths = sorted(by_depth)
    left, right = canvas.subplots(1, 2)
    names = [name for name in ("agreement", "exact_match") if name in by_depth[depths[0]]]
    for axes, curves in ((left, ["loss"]), (right, names)):
        for name, colour, (marker, dash) in zip(curves, theme["lines"], MARKERS, strict=False):
            values = [by_depth[depth][name] for depth in depths]
            axes.plot(depths, values, dash, marker=marker, markersize=4, color=colour, label=name.replace("_", " "))
        axes.axvline(result["trained"], color=theme["grid"], linestyle="--", linewidth=1)
        _over_depths(axes, "depth")
    left.set(ylabel="held-out loss, nats a token")
    right.set(ylabel="share", ylim=(-0.03, 1.03))
    right.legend()


def _difficulty(canvas: Any, result: Mapping[str, Any]) -> None:
    found = {int(d): row for d, row in result["difficulty"]["accuracy"].items()}
    levels, depths = sorted(found), sorted(map(int, next(iter(found.values()))))
    table = np.array([[found[level][str(depth)] for depth in depths] for level in levels])
    axes = canvas.add_subplot()
    image = axes.imshow(table, origin="lower", aspect="auto", cmap=MAP, vmin=0, vmax=1, interpolation="nearest")
    shown = range(0, len(depths), -(-len(depths) // 12))
    axes.set_xticks(list(shown), [str(depths[i]) for i in shown])
    axes.set_yticks(range(len(levels)), [str(level) for level in levels])
    axes.axhline(levels.index(result["difficulty"]["trained_to"]) + 0.5, color="white", linestyle="--", linewidth=1)
    if result["trained"] in depths:
        axes.axvline(depths.index(result["trained"]), color="white", linestyle="--", linewidth=1)
    axes.set(xlabel="depth", ylabel="difficulty")
    canvas.colorbar(image, ax=axes, label="right answers")


def _needed(canvas: Any, theme: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    passes = result["passes"]
    for place, (depth, its) in enumerate(passes.items(), 1):
        axes = canvas.add_subplot(1, len(passes), place)
        total = max(1, sum(its["needed"]))
        numbers = np.arange(1, len(its["needed"]) + 1)
        axes.bar(numbers, np.array(its["needed"]) / total, color=theme["lines"][0], label="the answer stands")
        if "halted" in its:
            taken = np.array(its["halted"][:-1]) / max(1, sum(its["halted"]))
            axes.plot(numbers, taken, "--", marker="s", markersize=3, color=theme["lines"][1], label="it halts")
            axes.legend()
        axes.set_title(f"a pass of depth {depth}", fontsize=9)
        _over_depths(axes, "from depth")
        axes.set(ylabel="share of the targets")


def _within(canvas: Any, theme: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    norm, residual, radius = canvas.subplots(1, 3)
    for (depth, its), colour, (marker, dash) in zip(result["passes"].items(), theme["lines"], MARKERS, strict=False):
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3, "linestyle": dash}
        look["label"] = f"a pass of {depth}"
        numbers = np.arange(1, len(its["norm"]) + 1)
        for axes, name in ((norm, "norm"), (residual, "residual")):
            axes.plot(numbers, np.array(its[name], float), **look)
        its = its["spectral_radius"]
        mean, least, greatest = (np.array(its[name], float) for name in ("mean", "least", "greatest"))
        radius.plot(its["depths"], mean, **look)
        radius.fill_between(its["depths"], least, greatest, color=colour, alpha=0.2, linewidth=0)
    if all(value for its in result["passes"].values() for value in its["spectral_radius"]["least"]):
        radius.set_yscale("log")  # the first step leads from a stream of another size, and stands far above the others
    radius.axhline(1, color=theme["grid"], linestyle="--", linewidth=1)
    if any(value for its in result["passes"].values() for value in its["residual"] if value):
        residual.set_yscale("log")
    for axes, label in ((norm, "norm |x|"), (residual, "change |x' - x| / |x|"), (radius, "spectral radius")):
        _over_depths(axes, "depth")
        axes.set(ylabel=label)
    norm.legend()


def _over_depths(axes: Any, label: str) -> None:
    axes.set(xlabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.5)
