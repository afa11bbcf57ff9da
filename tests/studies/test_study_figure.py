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


def drawn(members: dict) -> list:
    """The panels of a task with these members, the first of which is the baseline."""
    result = {"baseline": next(iter(members)), "tasks": {"text": {"metric": "loss", "members": members}}}
    canvas = Figure()
    study_figure._lay_out(canvas, study_figure._panels(result, "text"))
    return canvas.axes


@pytest.fixture(scope="module")
def panels():
    members = {"la": member(2**20, 1000.0, [4.0, 2.0], [6.0, 3.0]), "dr": member(2**20 + 2**16, 900.0, [5.0, 1.0])}
    return drawn(members)


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
    costs = panels[2]
    assert costs.get_xlim()[0] == 0 and costs.get_ylim()[0] == 0
    (dr,), (la,) = (line.get_xydata() for line in costs.lines)  # the slowest first
    np.testing.assert_allclose((la, dr), ((1.0, 1000.0), (1.0625, 900.0)))
    assert dr[0] < costs.get_xlim()[1] and la[1] < costs.get_ylim()[1]


def test_names_of_members_that_cost_the_same_do_not_overlap():
    members = {name: member(2**20, speed, [1.0]) for name, speed in (("a", 990.0), ("b", 500.0), ("c", 1000.0))}
    costs = drawn(members)[2]
    assert [(text.get_text(), text.get_ha()) for text in costs.texts] == [
        ("b", "left"),
        ("a", "left"),
        ("c", "right"),
    ]


def test_one_depth_has_no_panel_and_the_names_take_the_empty_place(panels):
    tokens, _, costs, empty = panels
    assert costs.get_ylabel() == "training tokens/s"
    assert tokens.get_legend() is None
    assert not empty.axison and [its.get_text() for its in empty.get_legend().get_texts()] == ["la", "dr"]


def test_several_depths_and_what_was_swept_are_shown_with_the_trained_and_the_chosen_marked():
    la, dr = member(2**20, 1000.0, [4.0, 2.0]), member(2**20, 900.0, [5.0, 1.0])
    la["seeds"]["0"]["by_depth"] = {"4": 2.5, "1": 3.5, "2": 2.0}
    la |= {"swept": {"1e-3": 2.0, "8e-3": 2.25}, "chosen": {"training.learning_rate": "1e-3"}}
    dr |= {"swept": {"1e-1": 7.0, "8e-3": 1.0}, "chosen": {"training.learning_rate": "8e-3"}}
    *_, depths, swept, costs, names = drawn({"la": la, "dr": dr})
    lines = [line.get_xydata().tolist() for line in depths.lines]
    assert lines == [[[1, 3.5], [2, 2.0], [4, 2.5]], [[2, 2.0]], [[2, 1.0]], [[2, 1.0]]]
    assert [text.get_text() for text in swept.get_xticklabels()] == ["1e-3", "8e-3", "1e-1"]
    lines = [line.get_xydata().tolist() for line in swept.lines]
    assert lines == [[[0, 2.0], [1, 2.25]], [[0, 2.0]], [[1, 1.0], [2, 7.0]], [[1, 1.0]]]
    assert "training.learning_rate" in swept.get_xlabel()
    assert costs.get_ylabel() == "training tokens/s" and not names.axison


def test_a_metric_that_was_never_measured_has_no_lines():
    """As of a benchmark that no run evaluates."""
    curves = drawn({"la": member(2**20, 1000.0, [4.0, 2.0]), "dr": member(2**20, 900.0)})
    assert len(curves[0].lines) == 1
    result = {"metric": "gsm8k", "members": {"la": member(2**20, 1000.0, [4.0, 2.0])}}
    panels = study_figure._panels({"baseline": "la", "tasks": {"text": result}}, "text")
    study_figure._lay_out(canvas := Figure(), panels)
    assert not canvas.axes[0].lines and canvas.axes[2].lines
