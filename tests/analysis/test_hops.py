"""The frontier of a graph's source: distances against a search, and models whose frontier is known."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dreamer_jax.analysis.collection import add, make_observer
from dreamer_jax.analysis.figures import make_figures
from dreamer_jax.analysis.hops import HOPS, hop_summary, hops_from
from dreamer_jax.analysis.report import numbers
from dreamer_jax.analysis.summary import scalars, summarise
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.parallel import make_mesh
from tests.families.plain_depth_recurrent import thoughts
from tests.families.puzzle_cases import GRAPH, changed, drawn_params, puzzles

LENGTH = 7


def test_distances_are_those_of_a_search():
    rng = np.random.default_rng(0)
    visible = rng.random((6, 15, 15)) < 0.12
    visible[0] = np.eye(15, k=-1, dtype=bool)  # one way through all of them, longer than HOPS
    source = rng.integers(0, 15, 6).astype(np.int32)
    source[0] = 0
    found = np.asarray(hops_from(visible, source))
    for edges, start, distances in zip(visible, source, found, strict=True):
        wanted, edge, reached = np.full(15, HOPS + 1), 0, {int(start)}
        while reached and edge <= HOPS:
            for node in reached:
                wanted[node] = min(wanted[node], edge)
            reached = {i for i in range(15) for j in reached if edges[i, j] and wanted[i] > HOPS}
            edge += 1
        np.testing.assert_array_equal(distances, wanted)
    assert found[0].tolist() == [*range(13), 13, 13]


@pytest.fixture(scope="module")
def batch():
    """One-way graphs of seven nodes."""
    edges = np.eye(LENGTH, dtype=bool) | np.eye(LENGTH, k=-1, dtype=bool)
    found = puzzles(GRAPH, rows=8, length=LENGTH)
    found |= {"visible": edges[None].repeat(8, 0), "read": np.array([[0, 6]] * 8, np.int32)}
    found["segment_ids"], found["tokens"][:, 0] = np.ones((8, LENGTH), np.int32), 1
    return found


@pytest.fixture(scope="module")
def observed(batch):
    """Parameters -> the summary, on eight devices."""
    observer = make_observer(GRAPH, make_mesh(MeshConfig(data=(8,))))
    return lambda params: summarise(GRAPH, add(None, observer(params, {}, batch)), {})


@pytest.mark.slow
def test_what_is_reached_is_what_differs(observed, batch):
    """Against two passes in NumPy; the mask lets nothing pass the diagonal, and news gets about as far as it may."""
    params = changed(drawn_params(GRAPH), "core.gate.bias", 1e4)
    params = changed(params, "core.attention.out", 10 * params["core"]["attention"]["out"])
    summary, unmarked = observed(params), dict(batch, tokens=batch["tokens"] * (np.arange(LENGTH) > 0))
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    states = [np.array(thoughts(GRAPH, wide, each, 4)[1:]) for each in (batch, unmarked)]
    differ = np.linalg.norm(states[0] - states[1], axis=-1) >= 0.03 * np.linalg.norm(states[0], axis=-1)
    np.testing.assert_allclose(summary["hops"]["reached"], differ.mean(1))
    assert summary["hops"]["nodes"] == [8] * LENGTH and np.triu(summary["hops"]["reached"], 2).max() == 0
    assert summary["hops"]["frontier"][:2] == [1, 2]
    np.testing.assert_allclose(summary["observed"]["gate_openness"], 1)
    assert {figure.name for figure in make_figures(summary)} >= {"hops", "observed", "lens", "residual"}
    assert scalars(summary)["analysis/hops/frontier/1"] == 2
    said = {label: value for label, value, _ in numbers(summary)}
    assert said["edges from the source that its news has come after each step"].startswith("1, 2, ")
    assert "answer right after the last depth" in said


def test_the_frontier_of_a_model_that_keeps_everything(observed):
    """With a closed gate only the source itself differs."""
    summary = observed(changed(drawn_params(GRAPH), "core.gate.bias", -1e4))
    assert summary["hops"]["frontier"] == [0] * 4
    np.testing.assert_allclose(summary["observed"]["gate_openness"], 0)


def test_distances_without_nodes_hold_nothing_back():
    summary = hop_summary(np.array([[4, 0, 0, 0], [4, 2, 0, 1]]), np.array([4, 4, 0, 1]))
    assert summary["frontier"] == [0, 3] and summary["reached"][1] == [1, 0.5, 0, 1]
    summary = hop_summary(np.array([[0, 0]]), np.array([4, 0]))
    assert summary["nodes"] == [4] and summary["frontier"] == [-1]
