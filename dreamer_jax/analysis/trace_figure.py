"""The picture of a traced generation: positions to the right, depth steps downwards, as Fig. 4 and 9 of "Efficient
parallel samplers" show theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dreamer_jax.analysis.drawing import Figure
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Trace

STAYS, AGAIN, LOST = "the text's token", "the same, entered again later", "another token"
"""What the entry was that a cell belongs to."""
FATES = {STAYS: "#0072b2", AGAIN: "#009e73", LOST: "#d55e00"}
SETTLED, RIGHT = "the text's next token, from here on", "that token, but it changes again"
OTHER, NONE = "another token", "the text has ended"
"""What a cell predicts as the next token."""
PREDICTIONS = {SETTLED: "#0072b2", RIGHT: "#56b4e9", OTHER: "#e69f00", NONE: "#b8b8b8"}
SHALLOW = 0.25
"""How much of its colour the first depth has; the last has all of it."""
MOST_LABELS = 64
"""Tokens that are written at the axis; of longer texts positions are."""


class Decoder(Protocol):
    """Makes texts of tokens."""

    def decode(self, ids: Any) -> str:
        """The text of tokens."""
        ...


def figure_of(trace: Trace, tokenizer: Decoder, title: str) -> Figure:
    """A figure of two panels: what entered at each position, how deep it is in each step, and what it predicts.

    Raises:
        UserError: the text is empty and nothing entered behind the prompt.
    """
    if not _columns(trace):
        raise UserError("a trace of an empty text has nothing to draw: the first token of this one ends it")
    steps = 1 + max((cell.step for cell in trace.cells), default=0)
    width = min(9.0, max(3.2, 0.17 * len(_columns(trace))))
    height = min(11.0, max(3.4, 1.8 + 0.07 * steps))

    def draw(canvas: Any, theme: Mapping[str, Any]) -> None:
        canvas.suptitle(title, fontsize=9)
        _draw(canvas, theme, trace, tokenizer)

    return Figure("trace", title, "", (2 * width, height), draw)


def fates(trace: Trace) -> list[str]:
    """For each cell, what its entry was: the token of the text, for good or until a later entry at the same position
    took its place, or another one."""
    last = {cell.position: cell.entry for cell in trace.cells}
    text = dict(enumerate(trace.tokens))
    return [
        LOST if text.get(cell.position) != cell.token else STAYS if last[cell.position] == cell.entry else AGAIN
        for cell in trace.cells
    ]


def predictions(trace: Trace) -> list[str]:
    """For each cell, how its prediction of the next token compares with the text; the entries of a position follow one
    another."""
    text = dict(enumerate(trace.tokens))
    found: list[str] = []
    settled: dict[int, bool] = {}
    for cell in reversed(trace.cells):
        wanted = text.get(cell.position + 1)
        right = cell.predicted == wanted
        settled[cell.position] = right and settled.get(cell.position, True)
        kind = SETTLED if settled[cell.position] else RIGHT if right else OTHER
        found.append(NONE if wanted is None else kind)
    return found[::-1]


def _columns(trace: Trace) -> range:
    """The positions that are shown."""
    own = [cell.position for cell in trace.cells]
    return range(min([*own, len(trace.prompt)]), max([*own, len(trace.tokens) - 1]) + 1)


def _draw(canvas: Any, theme: Mapping[str, Any], trace: Trace, tokenizer: Decoder) -> None:
    left, right = canvas.subplots(1, 2, sharey=True)
    deepest = max((cell.depth for cell in trace.cells), default=1)
    strength = [SHALLOW + (1 - SHALLOW) * cell.depth / deepest for cell in trace.cells]
    _panel(left, theme, trace, fates(trace), FATES, strength)
    _panel(right, theme, trace, predictions(trace), PREDICTIONS, [1.0] * len(trace.cells))
    left.set(ylabel="depth steps one after the other", title=f"what enters (darker: deeper, up to {deepest})")
    right.set(title="what is predicted next")
    for axes in (left, right):
        _label(axes, trace, tokenizer)


def _panel(
    axes: Any, theme: Any, trace: Trace, kinds: list[str], colours: dict[str, str], strength: list[float]
) -> None:
    """Cells as an image, each in the colour of its kind, and what the colours are."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    background = np.array(to_rgb(theme["background"]))
    steps = 1 + max((cell.step for cell in trace.cells), default=0)
    columns = _columns(trace)
    image = np.tile(background, (steps, len(columns), 1))
    for cell, kind, part in zip(trace.cells, kinds, strength, strict=True):
        colour = np.array(to_rgb(colours[kind]))
        image[cell.step, cell.position - columns.start] = part * colour + (1 - part) * background
    axes.imshow(image, aspect="auto", interpolation="nearest")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    patches = [Patch(color=colour, label=kind) for kind, colour in colours.items() if kind in kinds]
    axes.legend(handles=patches, fontsize=7, loc="upper right")


def _label(axes: Any, trace: Trace, tokenizer: Decoder) -> None:
    """The tokens of prompt and text below their positions, or positions where there are too many."""
    columns = _columns(trace)
    tokens = trace.tokens[columns.start :]
    if len(tokens) > MOST_LABELS:
        axes.set(xlabel="position" if columns.start < len(trace.prompt) else "position in the text")
        return
    # A space shows as a line; a dollar sign would begin a formula.
    names = [repr(tokenizer.decode([token]))[1:-1].replace(" ", "_").replace("$", r"\$") for token in tokens]
    axes.set_xticks(range(len(tokens)), names, rotation=90, fontsize=6)
