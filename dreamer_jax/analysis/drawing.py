"""What all figures are drawn with: themes, maps by depth, curves by depth, and files."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

MAP = "cividis"
"""Colour map of all figures: the same order of lightness in grey and for every kind of colour vision."""
LIGHT = {
    "text": "#1b1b1b",
    "background": "#ffffff",
    "grid": "#b8b8b8",
    "range": (0.0, 0.8),
    "lines": ("#0072b2", "#d55e00", "#009e73"),
}
DARK = {
    "text": "#e8e8e8",
    "background": "#16181c",
    "grid": "#555a62",
    "range": (0.2, 1.0),
    "lines": ("#56b4e9", "#e69f00", "#20c997"),
}
"""Colours of a theme. `range` is the part of the map that shows up as lines; `lines` are mostly of Okabe and Ito, and
curves of one panel differ in marker and dash too."""
MARKERS = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-"), ("v", "--"), ("P", ":"))


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Attributes:
        name: of its files.
        title, text: for the report.
        size: inches.
        draw: (matplotlib figure, theme) -> None.
    """

    name: str
    title: str
    text: str
    size: tuple[float, float]
    draw: Callable[[Any, dict[str, Any]], None]

    def render(self, kind: str, theme: dict[str, Any] = LIGHT) -> bytes:
        """The file: kind "png" (150 dots an inch) or "svg" (text as outlines)."""
        import matplotlib  # slow to import
        from matplotlib.figure import Figure as Canvas

        colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style: dict[str, Any] = dict.fromkeys(colours, theme["text"])
        style |= {"axes.facecolor": theme["background"], "figure.facecolor": theme["background"]}
        style |= {"grid.color": theme["grid"], "font.size": 9, "svg.hashsalt": self.name, "legend.frameon": False}
        with matplotlib.rc_context(style):  # type: ignore[arg-type]
            canvas = Canvas(figsize=self.size, layout="constrained")
            self.draw(canvas, theme)
            file = io.BytesIO()
            canvas.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        return file.getvalue()

    @functools.cached_property
    def svg(self) -> bytes:
        """The light one, which the folder of figures and the report both have."""
        return self.render("svg")

    def save(self, folder: epath.PathLike) -> list[epath.Path]:
        """Write name.png and name.svg; returns their paths."""
        files = {epath.Path(folder) / f"{self.name}.png": self.render("png")}
        files[epath.Path(folder) / f"{self.name}.svg"] = self.svg
        for path, content in files.items():
            path.write_bytes(content)
        return list(files)


def draw_heat(canvas, axes, table, label, x_label, y_label, **options) -> None:
    """A table [depth, x] as a map with depth 0 at the bottom, and its colour bar."""
    # `nearest`, so that every expert is a column of its own and none is smeared into its neighbour.
    image = axes.imshow(table, origin="lower", aspect="auto", cmap=MAP, interpolation="nearest", **options)
    axes.set(xlabel=x_label, ylabel=y_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    canvas.colorbar(image, ax=axes, label=label)


def draw_curves(axes, theme, curves: Mapping[str, Any], y_label: str) -> None:
    """Label -> values by depth, from 0, as lines that differ in colour, marker and dash, up to 18 of them.

    A depth without a value is left out of its line.
    """
    colours, markers = len(theme["lines"]), len(MARKERS)
    for number, (label, values) in enumerate(curves.items()):
        # Where the markers begin anew they are one ahead, so that each meets another colour.
        colour, (marker, dash) = theme["lines"][number % colours], MARKERS[(number + number // markers) % markers]
        values = np.array(values, float)  # None is not a number
        known = np.flatnonzero(~np.isnan(values))
        axes.plot(known, values[known], dash, marker=marker, color=colour, markersize=4, label=label)
    axes.set(xlabel="depth", ylabel=y_label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.5)
    if len(curves) > 1:
        axes.legend(fontsize=None if len(curves) <= 3 else 6)
