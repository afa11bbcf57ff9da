"""What figures show of models with more routers than Dreamer has, or fewer biases."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure as Canvas

from dreamer_jax.analysis.drawing import LIGHT
from dreamer_jax.analysis.figures import make_figures

BIAS = dict.fromkeys(("0%", "5%", "25%", "50%", "75%", "95%", "100%"), 0.5)
RESIDUAL = {name: [1.0, 1.0] for name in ("norm", "cosine", "distance")}


def summary_of(biases: dict[str, dict]) -> dict:
    """Of a model of depth 2 with these routers, each with its biases."""
    router = {"counts": [[1, 2]] * 2, "score_histogram": [[0.5, 0.5]] * 2}
    router |= {"entropy": [0.5, 0.6], "largest_entropy": 0.7}
    routers = {name: router | {"bias": bias} for name, bias in biases.items()}
    lens = {"accuracy": [0.5, 0.5], "answers": 0}
    model = {"depth": 2, "predicts": "next token"}
    return {"model": model, "routers": routers, "depth_attention": None, "lens": lens, "residual": RESIDUAL}


@pytest.mark.parametrize("count", [6, 18])
def test_every_router_has_a_curve_of_its_own_look(count):
    """As many as MoEUT of two layers has, or of six; none of them has biases."""
    names = [f"{kind}_{layer}" for kind in ("experts", "outputs", "values") for layer in range(count // 3)]
    figure = next(its for its in make_figures(summary_of({name: {} for name in names})) if its.name == "routers")
    canvas = Canvas()
    figure.draw(canvas, LIGHT)
    curves, scores, _ = canvas.axes  # the last one is a colour bar
    assert [text.get_text() for text in curves.get_legend().get_texts()] == [name.replace("_", " ") for name in names]
    assert len({(line.get_color(), line.get_marker()) for line in curves.lines}) == count
    assert scores.get_xlabel() == "score of selected experts: experts 0"
    assert "biases" not in figure.text


def test_biases_stand_above_the_names_of_their_routers():
    summary = summary_of({"depth_attention": {}, "dimensions": BIAS, "sequence_attention": BIAS})
    figure = next(its for its in make_figures(summary) if its.name == "routers")
    canvas = Canvas()
    figure.draw(canvas, LIGHT)
    axes = next(axes for axes in canvas.axes if axes.get_ylabel() == "balancing bias")
    places = dict(zip(axes.get_xticks(), (text.get_text() for text in axes.get_xticklabels()), strict=True))
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert [places[dot] for dot in dots] == ["dimensions", "sequence"]
    assert "biases" in figure.text
