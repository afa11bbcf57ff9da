"""Dreamer and Huginn under a classifier: they see what a puzzle lets them see, and nothing is left of the head."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from dreamer_jax.budget import program
from dreamer_jax.config.models.dreamer_classifier import DreamerClassifierConfig
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.models.huginn_classifier import HuginnClassifierConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.families.puzzles import logits_by_depth
from tests.families.puzzle_cases import puzzles

MODELS = {
    "dreamer": DreamerClassifierConfig(
        variant="DR+DA",
        depth=3,
        hidden_size=16,
        vocab_size=5,
        sa_heads=2,
        sa_kv_heads=1,
        sa_head_size=8,
        da_heads=2,
        da_kv_heads=1,
        da_head_size=8,
        num_experts=4,
        experts_per_token=2,
        expert_size=8,
        router_size=8,
        dtype="float32",
    ),
    "huginn": HuginnClassifierConfig(
        depth=3,
        hidden_size=16,
        vocab_size=5,
        heads=2,
        kv_heads=2,
        head_size=8,
        mlp_size=12,
        prelude_layers=1,
        core_layers=1,
        coda_layers=1,
        gradient_recurrences=3,
        dtype="float32",
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def solver(request):
    """(family, parameters and state, batch, logits after every depth of four)."""
    family: Any = build(MODELS[request.param])
    params, state = initialise(family, jax.random.key(0))
    params = jax.tree.map(lambda leaf: 2 * leaf if leaf.ndim > 1 else leaf, params)  # news shouldn't drown in rounding
    run = jax.jit(lambda batch: logits_by_depth(family, params, state, batch, 4))
    return family, (params, state), puzzles(family.config), run


@pytest.mark.slow_but("dreamer")
def test_news_comes_along_edges_only(solver):
    """On a way of nodes 0 -> 1 -> ... the last node's answer depends on the first once the depths reach so far."""
    family, _, batch, run = solver
    length = batch["tokens"].shape[1]
    visible = np.eye(length, dtype=bool) | np.eye(length, k=-1, dtype=bool)  # row i sees i and i - 1
    # Huginn looks along edges in its prelude and its coda too, Dreamer once a depth.
    spare = 2 if "huginn" in family.config.family else 0
    batch = {name: values[:1].repeat(length, 0) for name, values in batch.items()}
    batch |= {"visible": visible[None].repeat(length, 0), "segment_ids": np.ones_like(batch["segment_ids"])}
    batch["tokens"] = np.zeros_like(batch["tokens"])
    batch["tokens"][np.arange(1, length), np.arange(length - 1)] = 1  # row j + 1 is another at node j
    batch["read"] = np.full((length, 2), length - 1, np.int32)
    logits = np.asarray(run(batch))
    for depth in (1, 2, 3, 4):
        moved = np.abs(logits[depth - 1, 1:] - logits[depth - 1, 0]).max(-1) > 0
        np.testing.assert_array_equal(moved, np.arange(length - 1) >= length - 1 - depth - spare)


def test_an_edge_may_lead_to_what_comes_later(solver):
    """Node 0 sees the last node, which a causal model never would; and nodes have no order, but for the random state
    that Huginn gives to each place."""
    family, _, batch, run = solver
    batch = dict(batch) | {"segment_ids": np.ones_like(batch["segment_ids"])}
    batch["visible"], batch["read"] = np.ones_like(batch["visible"]), np.zeros_like(batch["read"])
    tokens = batch["tokens"].copy()
    tokens[:, -1] = (tokens[:, -1] + 1) % 5
    before = run(batch)
    assert np.all(np.abs(run({**batch, "tokens": tokens}) - before).max(-1) > 0)
    swapped = batch["tokens"].copy()
    swapped[:, [2, 4]] = swapped[:, [4, 2]]
    if not family.flags.random:
        np.testing.assert_allclose(run({**batch, "tokens": swapped}), before, atol=2e-5)


def test_counts(solver):
    """The classifier takes the head's place; both counters agree."""
    family, (params, _), _, _ = solver
    assert "head" not in params and "classifier" in params
    assert program.count(family.config, 7) == program.expected(family.config, 7)


@pytest.mark.slow_but("dreamer")
def test_it_learns_all_that_it_has(solver):
    """Every parameter gets a gradient from the label."""
    family, (params, state), batch, _ = solver

    @jax.jit
    @jax.grad
    def gradients(params):
        drawn = family.draw(jax.random.key(2), 0, len(batch["tokens"]))
        passed = forward(family, params, state, batch, drawn, key=jax.random.key(3))
        return family.loss(params, passed, batch)[0]

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients(params)):
        assert np.isfinite(leaf).all() and np.any(leaf), path


def test_a_causal_family_refuses_a_graph(solver):
    _, _, batch, _ = solver
    config = HuginnConfig(depth=1, hidden_size=8, heads=1, kv_heads=1, head_size=8, vocab_size=5, dtype="float32")
    with pytest.raises(UserError, match="huginn are causal; they can't attend along a graph"):
        forward(build(config), {}, {}, batch)
