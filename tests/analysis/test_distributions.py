"""The paper's measures on counts small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dreamer_jax.analysis import distributions as d
from dreamer_jax.analysis.summary import scalars

# Four depths; experts: one at depth 3 only, one at depths 2 and 3, one everywhere, one almost only at depth 0, none.
COUNTS = np.array(
    [
        [0, 0, 5, 95, 0],
        [0, 0, 5, 0, 0],
        [0, 6, 5, 0, 0],
        [10, 4, 5, 5, 0],
    ]
)


def test_distributions_sum_to_one():
    by_expert, by_depth = d.depth_given_expert(COUNTS), d.expert_given_depth(COUNTS)
    np.testing.assert_allclose(by_expert.sum(axis=0), [1, 1, 1, 1, 0])
    np.testing.assert_allclose(by_expert[:, 1], [0, 0, 0.6, 0.4])
    np.testing.assert_allclose(by_depth.sum(axis=1), 1)
    np.testing.assert_allclose(by_depth[3], np.array([10, 4, 5, 5, 0]) / 24)


def test_depths_needed():
    assert d.depths_needed(COUNTS).tolist() == [1, 2, 4, 1, 0]
    assert d.depths_needed(np.array([[9], [1], [0]])).tolist() == [1]  # exactly 90 % is enough
    assert d.depths_needed(np.array([[89], [11], [0]])).tolist() == [2]


def test_experts_needed():
    # Depth 0: 95 of 100 by one. Depth 1: one. Depth 2: 6 + 5 of 11. Depth 3: 10 + 5 + 5 = 20 of 24 is too few.
    assert d.experts_needed(COUNTS).tolist() == [1, 1, 2, 4]


def test_experts_are_ordered_by_depths_needed_then_by_a_drawn_depth():
    counts = np.zeros((4, 6), int)
    counts[[3, 0, 2], [0, 1, 2]] = 7  # need one depth: 3, 0, 2
    counts[:, 3] = 1  # needs four
    counts[[1, 2], [4, 4]] = 5  # needs two
    assert d.expert_order(counts).tolist() == [5, 1, 2, 0, 4, 3]  # the unused one first
    # Of ten experts that serve two depths alike the drawn one decides, by the seed.
    alike = np.tile([[5], [5]], 10)
    orders = [d.expert_order(alike, seed).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(10))


def test_drawn_depths_follow_the_distribution():
    counts = np.tile(np.array([[75], [25]]), 4000)
    order = d.expert_order(counts)  # all alike: draws alone decide, ties stay in place
    drawn_zero = int(np.argmax(np.diff(order) < 0)) + 1
    assert drawn_zero / 4000 == pytest.approx(0.75, abs=0.03)


def test_uniform_use_is_a_straight_line_and_gini_zero():
    x, y = d.lorenz(np.full(8, 3))
    np.testing.assert_allclose(x, y)
    numbers = d.expert_numbers(np.full((4, 8), 3), recurrent=True)
    assert numbers["global_gini"] == pytest.approx(0)
    assert numbers["against_la"] == [4, 4, 4, 4] and numbers["generalised"] == 1 and numbers["specialised"] == 0


def test_one_expert_takes_all():
    counts = np.zeros((4, 8), int)
    counts[:, 5] = 10
    assert d.expert_numbers(counts, recurrent=True)["global_gini"] == pytest.approx(7 / 8)
    x, y = d.lorenz(counts.sum(axis=0))
    assert x.tolist() == [0, 1] and y.tolist() == [0, 1 / 8]


def test_lorenz_takes_the_busiest_first():
    x, y = d.lorenz(np.array([1, 0, 6, 3]))
    np.testing.assert_allclose(x, [0, 0.6, 0.9, 1])
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75])
    assert d.lorenz(np.array([1, 1]), experts=8)[1].tolist() == [0, 1 / 8, 2 / 8]


def test_numbers_of_a_recurrent_model():
    numbers = d.expert_numbers(COUNTS, recurrent=True)
    assert numbers["experts"] == 5 and numbers["used"] == [2, 1, 2, 4]
    np.testing.assert_allclose(numbers["against_la"], np.array([2, 1, 2, 4]) * 4 / 5)
    np.testing.assert_allclose(numbers["against_la_90_percent"], np.array([1, 1, 2, 4]) * 4 / 4.5)
    assert numbers["specialised"] == pytest.approx(3 / 5)  # experts 0, 1 and 3
    assert numbers["specialised_deep"] == pytest.approx(2 / 5)  # experts 0 and 1
    assert numbers["generalised"] == pytest.approx(4 / 5)  # more than 0.8 depths: all that are used
    assert numbers["unused"] == pytest.approx(1 / 5)
    assert numbers["dedicated"] == [1, 0, 0, 1]


def test_layers_of_la_have_experts_of_their_own():
    numbers = d.expert_numbers(np.array([[4, 0], [2, 2]]), recurrent=False)
    assert numbers["experts"] == 4 and numbers["used"] == [1, 2]
    assert numbers["global_gini"] == pytest.approx(0.375)  # of 0, 2, 2, 4
    assert "against_la" not in numbers


def test_depth_map_of_a_model_that_looks_at_depth_0_is_one_column():
    scores = np.zeros((4, 4))
    scores[:, 0] = [1, 0.9, 0.8, 0.7]
    drawn = d.depth_map(scores)
    assert drawn[:, 0].tolist() == [1, 1, 1, 1]
    assert np.isnan(drawn[np.triu_indices(4, 1)]).all()
    assert (drawn[np.tril_indices(4)][[2, 4, 5, 7, 8, 9]] == 0).all()  # what is behind column 0
    np.testing.assert_allclose(d.depth_map(np.array([[1, 0], [0.25, 0.75]]))[1], [1 / 3, 1])


def test_scalars_by_hand():
    """How far back depth attention looks, and the mean score of a router's selections; none where there were none."""
    summary = {
        "model": {"depth": 3},
        "residual": {},
        "lens": {"accuracy": [0.0, 0.5, 1.0], "answers": 0},
        "routers": {"ea": {"entropy": [0.1, 0.2, 0.3], "score_histogram": [[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]]}},
        "depth_attention": {"scores": [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.2, 0.3]]},
    }
    wanted = {"on_itself": [1, 0.75, 0.3], "on_first": [1, 0.25, 0.5], "depths_back": [0, 0.25, 1.2]}
    named = {f"analysis/depth_attention/{name}/{l}": row[l] for name, row in wanted.items() for l in range(3)}
    named |= {"analysis/score/ea/0": 0.5, "analysis/score/ea/1": 0.75}
    found = {name: value for name, value in scalars(summary).items() if "attention/" in name or "score/" in name}
    assert found == pytest.approx(named)
