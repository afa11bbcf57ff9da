"""The paths of single tokens: which are chosen, where they go, and what each is called."""

from __future__ import annotations

import html
import json

import jax
import numpy as np
import pytest

from dreamer_jax.analysis.convergence import SETTLED
from dreamer_jax.analysis.drawing import DARK
from dreamer_jax.analysis.figures import make_figures
from dreamer_jax.analysis.report import numbers
from dreamer_jax.analysis.trajectories import (
    COMPONENTS,
    choose_tokens,
    kind_of,
    principal_components,
    trajectories,
)
from dreamer_jax.cli.main import main
from dreamer_jax.data import load_tokenizer
from dreamer_jax.families import Drawn, build, forward, initialise
from tests.analysis.cases import HUGINN, draw_without_files, make_run
from tests.analysis.test_convergence import TINY
from tests.analysis.test_observation import make_batch
from tests.families.toy import Toy, ToyConfig

STEPS, SIZE = 32, 24
RNG = np.random.default_rng(0)
AXES = np.linalg.qr(RNG.normal(size=(SIZE, SIZE)))[0]
CENTRE = 10 * AXES[5]


def circle(period: float, radius: float = 3.0, shrink: float = 1.0) -> np.ndarray:
    """[STEPS+1, SIZE] around CENTRE in a plane."""
    l = np.arange(STEPS + 1)
    size, angle = radius * shrink**l, 2 * np.pi * l / period
    return CENTRE + (size * np.cos(angle))[:, None] * AXES[0] + (size * np.sin(angle))[:, None] * AXES[1]


def line(stride: float) -> np.ndarray:
    return CENTRE + stride * np.arange(STEPS + 1)[:, None] * AXES[2]


def noise(size: float) -> np.ndarray:
    return size * np.random.default_rng(1).normal(size=(STEPS + 1, SIZE))


PATHS = {
    "rests": (CENTRE + 0 * line(1), "fixed point"),
    "rests at 0": (0 * line(1), "fixed point"),
    "rests but for a little noise": (CENTRE + noise(0.02), "fixed point"),
    "spirals in": (circle(7, shrink=0.7), "fixed point"),
    "jumps in": (np.concatenate([line(1)[:4], np.tile(CENTRE, (STEPS - 3, 1))]), "fixed point"),
    "small circle": (circle(7, radius=0.4 * SETTLED * 10), "fixed point"),
    "circles": (circle(7), "orbit"),
    "circles in many dimensions": (circle(9.5) + noise(0.05), "orbit"),
    "alternates": (circle(2), "orbit"),
    "spirals slowly": (circle(5, shrink=0.97), "orbit"),
    "circles after a while": (np.concatenate([line(2)[:9], circle(6)[: STEPS - 8]]), "orbit"),
    "slides": (line(0.5), "slider"),
    "slides slowly, each step below the threshold": (line(0.1), "slider"),
    "slides with noise": (line(0.5) + noise(0.02), "slider"),
    "slides after circling": (np.concatenate([circle(6)[:12], line(0.4)[12:]]), "slider"),
    "wanders": (np.cumsum(noise(0.5), axis=0), "other"),
    "jumps about": (CENTRE + noise(3), "other"),
    "half a circle": (circle(STEPS), "other"),
    "is no number": (np.full((STEPS + 1, SIZE), np.nan), "other"),
}


@pytest.mark.parametrize("name", PATHS)
def test_kinds(name):
    path, kind = PATHS[name]
    assert kind_of(path.astype(np.float32)) == kind
    assert kind_of(1000 * path) == kind  # a matter of shape, not of size


def test_components_of_a_plane():
    states = np.stack([circle(7), circle(5, radius=1)], axis=1)
    points, explained = principal_components(states)
    assert points.shape == (STEPS + 1, 2, COMPONENTS) and explained.shape == (COMPONENTS,)
    assert explained[:2].sum() == pytest.approx(1) and explained[0] >= explained[1]
    flat = states.reshape(-1, SIZE)
    apart = np.linalg.norm(flat[:, None] - flat, axis=-1)
    flat = points.reshape(-1, COMPONENTS)[:, :2]
    np.testing.assert_allclose(np.linalg.norm(flat[:, None] - flat, axis=-1), apart, atol=1e-9)
    again, _ = principal_components(-states)
    np.testing.assert_allclose(np.abs(again[..., :2]), np.abs(points[..., :2]), atol=1e-9)


def test_tokens_are_spread_over_the_first_documents():
    ids = np.array([[0, 2, 2, 2, 0, 5], [1] * 6, [0] * 6, [3] * 6, [4, 4, 7, 7, 7, 7]])
    documents, rows, columns = choose_tokens(ids)
    assert documents.tolist() == [0, 0, 1] + [2] * 5 + [3] * 5
    assert rows.tolist() == [0, 0, 0] + [1] * 5 + [3] * 5
    assert columns.tolist() == [2, 3, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]  # a document's only token, else not its first
    documents, _, columns = choose_tokens(np.ones((1, 101), int))
    assert columns.tolist() == [1, 21, 41, 60, 80, 100] and not documents.any()


def test_equal_to_numpy():
    family = build(TINY)
    params, batch = initialise(family, jax.random.key(0))[0], make_batch(TINY)
    found = trajectories(family, params, {}, batch, load_tokenizer("bytes"))
    documents, rows, columns = choose_tokens(batch["segment_ids"])
    assert found["depth"] == 4 * TINY.depth and len(found["tokens"]) == len(rows)
    state = jax.jit(lambda depth: forward(family, params, {}, batch, Drawn(depth, found["depth"])).state)
    deep = [np.asarray(state(depth)) for depth in range(1, found["depth"] + 1)]
    for number, token in enumerate(found["tokens"]):
        row, column = rows[number], columns[number]
        path = np.stack([states[row, column] for states in deep]).astype(np.float64)
        norms = np.linalg.norm(path, axis=1)
        np.testing.assert_allclose(token["norm"][1:], norms, rtol=1e-4)
        changes = np.linalg.norm(np.diff(path, axis=0), axis=1) / norms[1:]
        np.testing.assert_allclose(token["change"][1:], changes, atol=1e-4)
        cosines = np.sum(path[1:] * path[:-1], axis=1) / norms[1:] / norms[:-1]
        np.testing.assert_allclose(token["cosine"][1:], cosines, atol=1e-4)
        moving = np.flatnonzero(np.array(token["change"]) >= SETTLED)
        assert token["steps"] == (moving[-1] + 1 if len(moving) else 0)
        assert token["token"] == batch["tokens"][row, column] and token["document"] == documents[number]
        assert token["position"] == batch["positions"][row, column]
        assert np.shape(token["components"]) == (found["depth"] + 1, COMPONENTS)
        assert token["kind"] == kind_of(np.concatenate([path[:1], path]))


def test_a_model_with_weights_by_depth_goes_no_deeper():
    config = ToyConfig(depth=3, vocab_size=23)
    family = Toy(config)
    params = initialise(family, jax.random.key(0))[0]
    found = trajectories(family, params, {}, make_batch(config), load_tokenizer("bytes"))
    assert found["depth"] == 3 and all(len(token["norm"]) == 4 for token in found["tokens"])


@pytest.mark.slow
def test_command(tmp_path, capsys, monkeypatch):
    draw_without_files(monkeypatch)
    run = make_run(tmp_path / "huginn", model=HUGINN)
    assert main(["analyze", str(run), "--sequences", "5"]) == 0
    said = capsys.readouterr().out
    summary = json.loads((run / "analysis" / "analysis.json").read_text())
    assert summary["sequences"] == 5 and summary["trajectories"]["depth"] == 12
    tokens = summary["trajectories"]["tokens"]
    assert {token["document"] for token in tokens} == {0, 1, 2, 3} and all(len(t["text"]) == 1 for t in tokens)
    names = {path.stem for path in (run / "analysis" / "figures").iterdir()}
    assert names == {"lens", "entropy", "residual", "settling", "changes", "trajectories"}
    page = html.unescape((run / "analysis" / "report.html").read_text(encoding="utf-8"))
    assert page.count("<section>") == len(names) and "DR+DA" not in page
    for label, value, _ in numbers(summary):
        assert label in said and label in page and value in page
    assert sum(token["kind"] == tokens[0]["kind"] for token in tokens) == int(
        next(value for label, value, _ in numbers(summary) if f"called {tokens[0]['kind']}," in label).split()[0]
    )


def test_figures_take_any_text_and_few_tokens():
    """Also text that matplotlib would take for a formula, and none."""
    states = np.stack([path for path, _ in PATHS.values() if np.isfinite(path).all()][:3], axis=1)
    points, explained = principal_components(states)
    tokens = [
        {"document": d, "position": 1, "token": 7, "text": text, "kind": kind, "change": [0.1] * STEPS}
        | {"components": points[:, d].tolist()}
        for d, (text, kind) in enumerate([("$x_$", "orbit"), ("", "other"), ("日本語の長い長い長い文", "slider")])
    ]
    found = {"depth": STEPS, "explained": explained.tolist(), "tokens": tokens}
    lens = {"accuracy": [0.5], "answers": 0}
    residual = {name: [1.0] for name in ("norm", "cosine", "distance")}
    summary = {"model": {"depth": 8}, "routers": {}, "depth_attention": None, "lens": lens, "residual": residual}
    figures = {figure.name: figure for figure in make_figures(summary | {"trajectories": found})}
    for name in ("changes", "trajectories"):
        assert figures[name].render("svg") == figures[name].render("svg") != figures[name].render("svg", DARK)
