"""Figures of models whose states may converge: how far steps still move them, and the paths of single tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dreamer_jax.analysis.drawing import MAP, draw_curves

KINDS = {"fixed point": 0, "slider": 1, "orbit": 2}
"""Colour of a path's kind, among the lines of a theme."""
ON_MAP = "white"
"""Colour of lines on a colour map, in both themes."""
LONGEST = 10
"""Characters of a token that a label shows."""


def draw_entropy(canvas: Any, theme: dict[str, Any], lens: dict[str, Any]) -> None:
    """Entropy of the predicted distribution by depth."""
    axes = canvas.add_subplot()
    draw_curves(axes, theme, {"entropy": lens["entropy"]}, "entropy of the prediction, nats")
    axes.set_ylim(0, 1.08 * max(1e-3, *lens["entropy"]))


def draw_settling(canvas: Any, theme: dict[str, Any], found: dict[str, Any]) -> None:
    """Left: changes by depth, over all tokens. Right: tokens by the steps that they need to settle."""
    threshold, shares, settled = found["threshold"], np.array(found["changes"]), np.array(found["settled"])
    axes = canvas.add_subplot(1, 2, 1)
    depths = np.arange(len(shares) + 1) - 0.5
    image = axes.pcolormesh(found["edges"], depths, shares, cmap=MAP, vmin=0)
    axes.axvline(threshold, color=ON_MAP, linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="change |s' - s| / |s'|", ylabel="depth")
    axes.yaxis.get_major_locator().set_params(integer=True)
    canvas.colorbar(image, ax=axes, label="share of the tokens")
    axes = canvas.add_subplot(1, 2, 2)
    shares, last = settled / max(1, settled.sum()), len(settled) - 1
    axes.bar(range(last), shares[:-1], color=theme["lines"][0], label="settle")
    axes.bar(last, shares[-1], color=theme["lines"][1], hatch="//", label=f"still move in step {last}")
    axes.set(xlabel=f"steps until all changes are below {threshold}", ylabel="share of the tokens")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def draw_changes(canvas: Any, summary: dict[str, Any]) -> None:
    """A line for each chosen token, documents below one another, and how far each step moves its state."""
    tokens = summary["trajectories"]["tokens"]
    table = np.log10(np.maximum([token["change"] for token in tokens], 1e-8))
    axes = canvas.add_subplot()
    image = axes.imshow(table, aspect="auto", cmap=MAP, interpolation="nearest")
    axes.set_yticks(range(len(tokens)), [_label(token) for token in tokens], fontsize=7)
    for row in range(1, len(tokens)):
        if tokens[row]["document"] != tokens[row - 1]["document"]:
            axes.axhline(row - 0.5, color=ON_MAP, linewidth=3)
    axes.axvline(summary["model"]["depth"] - 0.5, color=ON_MAP, linestyle="--", linewidth=1)
    axes.set(xlabel="depth", ylabel="token, and its place in the document")
    axes.xaxis.get_major_locator().set_params(integer=True)
    canvas.colorbar(image, ax=axes, label="log10 of the change |s' - s| / |s'|")


def draw_trajectories(canvas: Any, theme: dict[str, Any], found: dict[str, Any]) -> None:
    """A panel for each chosen token, documents below one another: its states' first two principal components."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    tokens, depth = found["tokens"], found["depth"]
    documents = [token["document"] for token in tokens]
    columns = max(documents.count(document) for document in documents)
    first, last = theme["range"]
    colours = ListedColormap(colormaps[MAP](np.linspace(first, last, depth + 1)))
    panels = []
    for token in tokens:
        place = documents.index(token["document"])
        number = token["document"] * columns + len(panels) - place + 1
        axes = canvas.add_subplot(documents[-1] + 1, columns, number)
        _path(axes, theme, np.array(token["components"])[:, :2], colours)
        line = theme["lines"][KINDS[token["kind"]]] if token["kind"] in KINDS else theme["text"]
        axes.set_title(f"{_label(token)}\n{token['kind']}", fontsize=8, color=line)
        panels.append(axes)
    names = [f"PC{number} ({share:.0%} of the variance)" for number, share in enumerate(found["explained"][:2], 1)]
    canvas.supxlabel(names[0], fontsize=9)
    canvas.supylabel(names[-1], fontsize=9)
    canvas.colorbar(ScalarMappable(Normalize(0, depth), colours), ax=panels, label="step", shrink=0.6)


def _path(axes, theme, points: np.ndarray, colours) -> None:
    """A path [D+1, 2]: a dot for each state, a ring around the first, a cross on the last."""
    axes.plot(*points.T, color=theme["grid"], linewidth=0.6)
    axes.scatter(*points.T, c=range(len(points)), cmap=colours, s=9, zorder=2)
    axes.plot(*points[0], "o", color=theme["text"], fillstyle="none", markersize=8)
    axes.plot(*points[-1], "x", color=theme["text"], markersize=6, markeredgewidth=1.5, zorder=3)
    axes.tick_params(labelsize=6)
    axes.set_aspect("equal", adjustable="datalim")  # an orbit shall look like one


def _label(token: dict[str, Any]) -> str:
    """A token as text in quotes, in characters that every font has, or its number without text; and its position."""
    text = token["text"] if len(token["text"]) <= LONGEST else token["text"][:LONGEST] + ".."
    text = json.dumps(text) if text else f"<{token['token']}>"
    return f"{text} {token['position']}".replace("$", r"\$")
