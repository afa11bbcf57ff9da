"""The picture of a trace, of a few cells that are known."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dreamer_jax.analysis import trace_figure
from dreamer_jax.analysis.drawing import LIGHT
from dreamer_jax.analysis.trace_figure import AGAIN, LOST, NONE, OTHER, RIGHT, SETTLED, STAYS, fates, predictions
from dreamer_jax.errors import UserError
from dreamer_jax.inference.batches import Generated
from dreamer_jax.inference.tracing import Cell, Trace

# Behind two tokens of a prompt: 7 8 9. A guess 5 at position 3 is wrong, and 8 enters there, twice.
TRACE = Trace(
    [1, 1],
    Generated([7, 8, 9], [2, 2, 2]),
    [
        Cell(0, 2, 1, 0, 7, 8),
        Cell(1, 2, 2, 0, 7, 5),
        Cell(1, 3, 1, 1, 5, 9),
        Cell(2, 2, 3, 0, 7, 8),
        Cell(3, 3, 1, 2, 8, 9),
        Cell(4, 3, 1, 3, 8, 1),
        Cell(5, 3, 2, 3, 8, 9),
        Cell(5, 4, 1, 4, 9, 6),
    ],
)


class Digits:
    def decode(self, ids):
        return "".join(f" {token}$" for token in ids)


def test_what_entered_and_what_is_predicted():
    assert fates(TRACE) == [STAYS, STAYS, LOST, STAYS, AGAIN, STAYS, STAYS, STAYS]
    assert predictions(TRACE) == [RIGHT, OTHER, RIGHT, SETTLED, RIGHT, OTHER, SETTLED, NONE]


def test_the_picture_has_a_cell_for_each_position_and_step():
    canvas = Figure()
    trace_figure._draw(canvas, LIGHT, TRACE, Digits())
    left, right = (np.asarray(axes.images[0].get_array()) for axes in canvas.axes)
    assert left.shape == right.shape == (6, 3, 3)
    for image, kinds, colours in (
        (left, fates(TRACE), trace_figure.FATES),
        (right, predictions(TRACE), trace_figure.PREDICTIONS),
    ):
        drawn = {(cell.step, cell.position - 2) for cell in TRACE.cells}
        for step, column in np.ndindex(6, 3):
            assert ((image[step, column] == 1).all()) == ((step, column) not in drawn)
        for cell, kind in zip(TRACE.cells, kinds, strict=True):
            if image is right or cell.depth == 3:  # the deepest has the whole colour
                np.testing.assert_allclose(image[cell.step, cell.position - 2], to_rgb(colours[kind]))
    assert (left[0, 0] > left[1, 0]).any() and (left[0, 0] >= left[1, 0]).all()  # darker: deeper
    assert [label.get_text() for label in canvas.axes[0].get_xticklabels()] == [r"_7\$", r"_8\$", r"_9\$"]
    assert trace_figure.figure_of(TRACE, Digits(), "lossless").render("svg").startswith(b"<?xml")


def test_steps_are_counted_in_whole_numbers():
    """Also of a text that ends at its second token, after few steps."""
    short = Trace([1, 1], Generated([7], [2]), [Cell(step, 2, step + 1, 0, 7, 8) for step in range(3)])
    canvas = Figure()
    trace_figure._draw(canvas, LIGHT, short, Digits())
    assert all(tick == round(tick) for tick in canvas.axes[0].get_yticks())


def test_an_empty_text_has_no_picture():
    """Its first token, which comes of the prompt, ends it."""
    with pytest.raises(UserError, match="nothing to draw: the first token of this one ends it"):
        trace_figure.figure_of(Trace([1, 1], Generated([], []), []), Digits(), "static")
    one = Trace([1, 1], Generated([7], [2]), [])  # as --max-tokens 1 gives
    assert trace_figure.figure_of(one, Digits(), "static").render("svg").startswith(b"<?xml")
