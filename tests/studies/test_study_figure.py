"""The figure of a study shows means over seeds, their ranges, and costs that can be compared by eye."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from dreamer_jax.studies import study_figure


def member(memory: int, speed: float, *runs: list[float]) -> dict:
    """A member whose runs had these losses after 10, 20, ... tokens."""
    seeds = {
        str(seed): {
            "curves": {"loss": [[10 * (i + 1), loss] for i, loss in enumerate(losses)]},
            "tokens_per_second": speed,
            "by_depth": {"2": losses[-1]},
        }
        for seed, losses in enumerate(runs)
    }
    costs = {"parameters": 1, "flops_per_token": 1, "training_flops_per_token": 3, "memory_bytes": memory, "depth": 2}
    return {**costs, "seeds": seeds}


@pytest.fixture(scope="module")
def panels():
    members = {"la": member(2**20, 1000.0, [4.0, 2.0], [6.0, 3.0]), "dr": member(2**20 + 2**16, 900.0, [5.0, 1.0])}
    canvas = Figure()
    study_figure._panels(canvas, {"baseline": "la", "tasks": {"text": {"metric": "loss", "members": members}}}, "text")
    return canvas.axes


def test_lines_are_means_over_tokens_and_over_flops_and_bands_are_ranges(panels):
    tokens, flops, *_ = panels
    for axes, scale in ((tokens, 1), (flops, 3)):
        la, dr = axes.lines
        np.testing.assert_allclose(la.get_xydata(), [[10 * scale, 5.0], [20 * scale, 2.5]])
        np.testing.assert_allclose(dr.get_xydata(), [[10 * scale, 5.0], [20 * scale, 1.0]])
        corners = {(x, y) for x, y in axes.collections[0].get_paths()[0].vertices}
        assert {(10 * scale, 4), (10 * scale, 6), (20 * scale, 2), (20 * scale, 3)} <= corners


def test_costs_that_are_nearly_equal_stand_nearly_together(panels):
    """From zero on both axes: a difference of six percent takes six percent of the width."""
    costs = panels[3]
    assert costs.get_xlim()[0] == 0 and costs.get_ylim()[0] == 0
    (dr,), (la,) = (line.get_xydata() for line in costs.lines)  # the slowest first
    np.testing.assert_allclose((la, dr), ((1.0, 1000.0), (1.0625, 900.0)))
    assert dr[0] < costs.get_xlim()[1] and la[1] < costs.get_ylim()[1]


def test_names_of_members_that_cost_the_same_do_not_overlap():
    members = {name: member(2**20, speed, [1.0]) for name, speed in (("a", 990.0), ("b", 500.0), ("c", 1000.0))}
    canvas = Figure()
    study_figure._panels(canvas, {"baseline": "a", "tasks": {"t": {"metric": "loss", "members": members}}}, "t")
    assert [(text.get_text(), text.get_ha()) for text in canvas.axes[3].texts] == [
        ("b", "left"),
        ("a", "left"),
        ("c", "right"),
    ]
