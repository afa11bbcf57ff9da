"""The figures, drawn from a summary: the paper's four, and what else is worth seeing by depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dreamer_jax.analysis.convergence_figures import draw_changes, draw_entropy, draw_settling, draw_trajectories
from dreamer_jax.analysis.distributions import (
    depth_given_expert,
    depth_map,
    depths_needed,
    expert_given_depth,
    expert_order,
    lorenz,
)
from dreamer_jax.analysis.drawing import MAP, Figure, draw_curves, draw_heat
from dreamer_jax.analysis.summary import EXPERTS, Summary


def make_figures(summary: Summary, layered: Summary | None = None) -> list[Figure]:
    """The figures that apply to a model, in the order of the report.

    Args:
        summary: of the model.
        layered: of an LA model, for Fig. 6.
    """
    from dreamer_jax.analysis import texts

    recurrent = "specialised" in summary.get("experts", {})  # one set of experts for all depths
    counts = np.array(summary["routers"][EXPERTS]["counts"] if "experts" in summary else 0)
    figures = []

    def add(name: str, size: tuple[float, float], draw: Callable, more: str = "") -> None:
        figures.append(Figure(name, texts.TITLES[name], texts.TEXTS[name] + more, size, draw))

    if summary["depth_attention"]:
        add("depth_attention", (5.2, 4.4), lambda c, t: _depth_attention(c, t, summary))
    if recurrent:
        add("depth_given_expert", (7.5, 3.6), lambda c, t: _experts(c, counts, depth_given_expert, "P(depth | expert)"))
    if counts.ndim:
        add("lorenz", (6.4, 4.4), lambda c, t: _lorenz(c, t, counts, recurrent, layered))
    if recurrent:
        add("expert_given_depth", (7.5, 3.6), lambda c, t: _experts(c, counts, expert_given_depth, "P(expert | depth)"))
        if len(summary["routers"]) > 1:
            add("attention_experts", (7.5, 3.6), lambda c, t: _attention_experts(c, t, summary))
    add("lens", (6.4, 3.4), lambda c, t: _lens(c, t, summary))
    if "entropy" in summary["lens"]:
        add("entropy", (6.4, 3.4), lambda c, t: draw_entropy(c, t, summary["lens"]))
    add("residual", (9, 2.9), lambda c, t: _residual(c, t, summary))
    if "convergence" in summary:
        add("settling", (9, 3.4), lambda c, t: draw_settling(c, t, summary["convergence"]))
    if "trajectories" in summary:
        paths = summary["trajectories"]
        documents = 1 + paths["tokens"][-1]["document"]
        add("changes", (7.5, 1.2 + 0.17 * len(paths["tokens"])), lambda c, _: draw_changes(c, summary))
        add("trajectories", (11, 1 + 2.1 * documents), lambda c, t: draw_trajectories(c, t, paths))
    if "hops" in summary:
        add("hops", (5.2, 4.0), lambda c, _: _hops(c, summary["hops"]))
    if summary["routers"]:
        biased = any(router["bias"] for router in summary["routers"].values())
        more = texts.BIASES if biased else ""
        add("routers", (9, 2.9), lambda c, t: _routers(c, t, summary), more)
    if "observed" in summary:
        add("observed", (6.4, 3.4), lambda c, t: _observed(c, t, summary))
    return figures


def _depth_attention(canvas, theme, summary: Summary) -> None:
    table = depth_map(np.array(summary["depth_attention"]["scores"]))
    axes = canvas.add_subplot()
    axes.set_facecolor(theme["background"])
    label = "average score over the row's largest"
    draw_heat(canvas, axes, table, label, "depth looked back to", "depth looking", vmin=0, vmax=1)


def _experts(canvas, counts: np.ndarray, distribution: Callable, label: str) -> None:
    order = expert_order(counts)
    axes = canvas.add_subplot()
    table = distribution(counts)[:, order]
    # A few busy cells would leave the rest black.
    top = max(float(np.quantile(table, 0.99)), 1e-12)
    draw_heat(canvas, axes, table, label, "expert, by depths that hold 90 % of its use", "depth", vmin=0, vmax=top)
    canvas.axes[-1].set_title("≥" if table.max() > top else "", fontsize=8)
    groups = depths_needed(counts)[order]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    upper = axes.secondary_xaxis("top")
    shown: list[int] = []
    for start in starts.tolist():  # labels that would stand on each other are left out
        if not shown or start - shown[-1] >= len(order) / 30:
            shown.append(start)
    upper.set_xticks(shown, [str(groups[start]) for start in shown])
    upper.set_xlabel("depths that hold 90 %")


def _lorenz(canvas, theme, counts: np.ndarray, recurrent: bool, layered: Summary | None) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, Normalize

    axes = canvas.add_subplot()
    depths, width = counts.shape
    experts = width if recurrent else width * depths
    first, last = theme["range"]
    colours = ListedColormap(colormaps[MAP](np.linspace(first, last, depths)))

    def plot(curve: tuple[np.ndarray, np.ndarray], *args: Any, **options: Any) -> None:
        axes.plot(curve[0][1:], curve[1][1:], *args, **options)  # a log axis has no 0

    for depth, row in enumerate(counts):
        plot(lorenz(row, experts), color=colours(depth), linewidth=1)
    everything = counts.sum(axis=0) if recurrent else counts.reshape(-1)
    plot(lorenz(everything), ":", color=theme["text"], linewidth=1.2, label="all depths together")
    if layered:
        plot(layered_curve(layered), "--", color=theme["text"], linewidth=2.6, label="LA, a layer")
    elif recurrent:
        x = np.linspace(1 / experts, 1, 200)
        label = f"what a layer of LA could use: 1/{depths}, balanced"
        axes.plot(x, x / depths, "--", color=theme["text"], linewidth=2.6, label=label)
    axes.set(xlabel="portion of the routings", ylabel="portion of all experts", xlim=(0, 1), yscale="log")
    axes.set_ylim(top=1.2)
    axes.grid(alpha=0.5)
    axes.legend(loc="best")
    from matplotlib.cm import ScalarMappable

    bar = canvas.colorbar(ScalarMappable(Normalize(-0.5, depths - 0.5), colours), ax=axes, label="depth")
    bar.locator.set_params(integer=True)


def layered_curve(layered: Summary) -> tuple[np.ndarray, np.ndarray]:
    """LA's curve of Fig. 6: its layers' counts, sorted and averaged by rank, among the experts of all its layers."""
    ranked = -np.sort(-np.array(layered["routers"][EXPERTS]["counts"]), axis=1)
    return lorenz(ranked.mean(axis=0), ranked.size)


def _attention_experts(canvas, theme, summary: Summary) -> None:
    names = [name for name in summary["routers"] if name != EXPERTS]
    for place, name in enumerate(names, 1):
        axes = canvas.add_subplot(1, len(names), place)
        axes.set_facecolor(theme["background"])
        counts = np.array(summary["routers"][name]["counts"])
        table = np.where(counts.any(axis=1, keepdims=True), expert_given_depth(counts), np.nan)
        title = "dimension" if name == "dimensions" else f"expert of the {name.replace('_', ' ')}"
        draw_heat(canvas, axes, table, "P(expert | depth)", title, "depth", vmin=0, vmax=1)


def _lens(canvas, theme, summary: Summary) -> None:
    lens = summary["lens"]
    curves = {"every target": lens["accuracy"]}
    if lens["answers"]:
        curves["answers"] = lens["answer_accuracy"]
    axes = canvas.add_subplot()
    draw_curves(axes, theme, curves, f"{summary['model']['predicts']} right")
    axes.set_ylim(0, 1.08 * max(1e-3, *map(max, curves.values())))


def _residual(canvas, theme, summary: Summary) -> None:
    labels = {"norm": "L2 norm", "cosine": "cosine with the depth before", "distance": "distance from the depth before"}
    for place, (name, label) in enumerate(labels.items(), 1):
        axes = canvas.add_subplot(1, 3, place)
        draw_curves(axes, theme, {label: summary["residual"][name]}, label)
        if name == "distance":  # the embeddings are short, so the first depth goes furthest by far
            axes.set_yscale("log")


def _hops(canvas, hops: dict[str, Any]) -> None:
    axes, table = canvas.add_subplot(), np.array(hops["reached"])
    sides = (-0.5, table.shape[1] - 0.5, 0.5, len(table) + 0.5)  # steps are counted from 1
    draw_heat(canvas, axes, table, "share reached", "edges from the source", "step", extent=sides, vmin=0, vmax=1)
    axes.plot(hops["frontier"], range(1, len(table) + 1), color="red", marker="o", markersize=4)


def _observed(canvas, theme, summary: Summary) -> None:
    curves = {name.replace("_", " "): row for name, row in summary["observed"].items() if np.ndim(row) == 1}
    draw_curves(canvas.add_subplot(), theme, curves, "average over the tokens")


def _routers(canvas, theme, summary: Summary) -> None:
    routers = summary["routers"]
    biases = {name: router["bias"] for name, router in routers.items() if router["bias"]}
    panels = 3 if biases else 2
    share = {
        name.replace("_", " "): np.array(router["entropy"], float) / max(router["largest_entropy"], 1e-12)
        for name, router in routers.items()
    }
    draw_curves(canvas.add_subplot(1, panels, 1), theme, share, "entropy over the largest possible")
    axes = canvas.add_subplot(1, panels, 2)
    shown = EXPERTS if EXPERTS in routers else next(iter(routers))
    histogram = np.array(routers[shown]["score_histogram"])
    edges = (0, 1, -0.5, len(histogram) - 0.5)
    label = "score of selected experts" + ("" if shown == EXPERTS else f": {shown.replace('_', ' ')}")
    draw_heat(canvas, axes, histogram, "share", label, "depth", extent=edges, vmin=0)
    axes.xaxis.get_major_locator().set_params(integer=False)
    if not biases:
        return
    axes = canvas.add_subplot(1, panels, 3)
    for place, bias in enumerate(biases.values()):
        low, _, first, middle, third, _, high = bias.values()
        axes.plot([place, place], [low, high], color=theme["lines"][0], linewidth=1)
        axes.plot([place, place], [first, third], color=theme["lines"][0], linewidth=6, solid_capstyle="butt")
        axes.plot(place, middle, "o", color=theme["lines"][1], markersize=4)
    names = [name.split("_")[0] for name in biases]
    axes.set_xticks(range(len(names)), names, rotation=0 if len(names) <= 3 else 30)
    axes.set(ylabel="balancing bias", xlim=(-0.6, len(names) - 0.4))
    axes.grid(alpha=0.5, axis="y")
