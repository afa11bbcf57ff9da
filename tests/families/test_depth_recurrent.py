"""The depth-recurrent transformer against a plain float64 version of its equations, and in the limits of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import pytest

from dreamer_jax.budget import analytic, program
from dreamer_jax.config.models.depth_recurrent import DepthRecurrentConfig
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import Drawn, build, forward, initialise
from dreamer_jax.families.puzzles import accuracy_by_depth, logits_by_depth
from dreamer_jax.inference.model import fold
from tests.families.plain_depth_recurrent import answers, mean_loss, thoughts
from tests.families.puzzle_cases import FORMS, GRAPH, changed, drawn_params, form, puzzles

DEEPEST = 6  # beyond the trained depth, 4


class Programs:
    """A model's compiled programs, each for parameters, a batch and a run-time number of steps."""

    def __init__(self, config):
        self.config = config
        family: Any = build(config)

        def of_all(params, batch):
            return logits_by_depth(family, params, {}, batch, DEEPEST)

        def of_one(params, batch, depth):
            passed = forward(family, params, {}, batch, Drawn(depth, DEEPEST))
            loss, logged = family.loss(params, passed, batch)
            logits = family.class_logits(params, passed.state, passed.memory, passed.context)
            return loss, (logged, passed.state, logits, family.evaluate(params, passed, batch))

        self.of_all = jax.jit(of_all)
        self.of_one = jax.jit(jax.value_and_grad(of_one, has_aux=True))

    def state(self, params, batch, depth):
        """H_T."""
        return np.asarray(self.of_one(params, batch, depth)[0][1][1])


@pytest.fixture(scope="module")
def programs():
    """Form -> its programs, each compiled once."""
    return {name: Programs(form(name)) for name in FORMS}


@pytest.fixture(scope="module", params=FORMS)
def case(request, programs):
    """(programs, parameters, batch) of a form."""
    config = form(request.param)
    return programs[request.param], drawn_params(config), puzzles(config)


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def test_forward_is_that_of_the_equations(case):
    """Also deeper than trained, and the logits after every step come from one pass."""
    its, params, batch = case
    states = thoughts(its.config, wide(params), batch, DEEPEST)
    wanted = np.stack([answers(its.config, wide(params), batch, state) for state in states[1:]])
    np.testing.assert_allclose(its.of_all(params, batch), wanted, atol=2e-4, rtol=1e-4)


def test_one_pass_says_what_passes_of_each_depth_say(case):
    its, params, batch = case
    together = its.of_all(params, batch)
    for depth in (1, 2, DEEPEST):
        _, _, logits, _ = its.of_one(params, batch, depth)[0][1]
        np.testing.assert_allclose(logits, together[depth - 1], atol=1e-6)


@pytest.mark.slow_but("last")
@pytest.mark.parametrize("loss_at", ["last", "every"])
def test_gradients_are_those_of_the_unrolled_loop(loss_at):
    """Of the loss after a run-time number of steps, or of the mean over steps 1 to T; rows of padding don't count."""
    config = form("text", loss_at=loss_at)
    its, params, batch, steps = Programs(config), drawn_params(config), puzzles(config), 3
    (loss, (logged, *_)), gradients = its.of_one(params, batch, steps)
    rows = batch["loss_mask"].sum()
    assert rows == 3 and logged["thinking_steps"] == 3 * steps

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        return mean_loss(config, params, jax.tree.map(jnp.asarray, batch), steps, jnp, jax.scipy.special.erf)

    wanted, wanted_gradients = plain(jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(loss / rows, wanted, rtol=1e-5)
    np.testing.assert_allclose(wanted, mean_loss(config, wide(params), batch, steps), rtol=1e-5)
    for found, plainly in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(found / rows, plainly, atol=1e-5 * max(1, np.abs(plainly).max()))
    assert not np.any(gradients["depth_embedding"][steps:])


def test_a_closed_gate_keeps_the_state(programs):
    """b_z -> -inf: H_t = H_{t-1}, whatever the block makes (Eq. 3)."""
    config, batch = form("graph"), puzzles(form("graph"))
    params = changed(drawn_params(config), "core.gate.bias", -1e4)
    np.testing.assert_array_equal(programs["graph"].state(params, batch, 3), params["embedding"][batch["tokens"]])


def test_an_open_gate_is_no_gate(programs):
    """b_z -> +inf: H_t = H~."""
    config, batch = form("graph", gate=False), puzzles(form("graph"))
    params = changed(drawn_params(form("graph")), "core.gate.bias", 1e4)
    wanted = thoughts(config, wide(params), batch, 3)[-1]
    np.testing.assert_allclose(programs["graph"].state(params, batch, 3), wanted, atol=1e-4)


def test_a_fresh_gate_opens_by_an_eighth():
    """sigmoid(-2) = 0.119 where the matrix says nothing: the state keeps 88 % (section 3.1)."""
    params, _ = initialise(build(GRAPH), jax.random.key(0))
    bias, matrix = params["core"]["gate"]["bias"], params["core"]["gate"]["matrix"]
    np.testing.assert_allclose(1 / (1 + np.exp(-np.asarray(bias))), 0.1192, atol=1e-4)
    assert np.abs(matrix).max() <= 32**-0.5 and np.std(matrix) == pytest.approx(32**-0.5 / 3**0.5, rel=0.1)


def test_layer_scale_of_zero_leaves_the_depth_embeddings(programs):
    """g = 0 and an open gate: H_T = H_0 + e_1 + ... + e_T; the embedding is kept in the stream (Eq. 6)."""
    params, batch = drawn_params(form("text")), puzzles(form("text"))
    for path in ("core.attention_scale.factor", "core.mlp_scale.factor"):
        params = changed(params, path, 0.0)
    params = changed(params, "core.gate.bias", 1e4)
    wanted = params["embedding"][batch["tokens"]] + params["depth_embedding"][:3].sum(0)
    np.testing.assert_allclose(programs["text"].state(params, batch, 3), wanted, atol=1e-5)


def test_fresh_layer_scale_is_nearly_the_identity():
    params, _ = initialise(build(form("text")), jax.random.key(0))
    for name in ("attention_scale", "mlp_scale"):
        np.testing.assert_array_equal(params["core"][name]["factor"], np.float32(1e-4))


def distances(visible):
    """[S, S]: steps that it takes from column j to row i, by a search from every column; 99 where there is no way."""
    length = len(visible)
    steps = np.full((length, length), 99)
    for source in range(length):
        reached, step = np.arange(length) == source, 0
        while np.any(reached & (steps[:, source] == 99)):
            steps[reached & (steps[:, source] == 99), source] = step
            reached, step = reached | (visible & reached).any(1), step + 1
    return steps


def test_news_travels_one_hop_a_step(programs):
    """A node's state after t steps depends on exactly the nodes at most t edges before it, and never against edges."""
    length = 8
    edges = np.zeros((length, length), bool)
    for a, b in ((0, 1), (1, 2), (2, 3), (3, 4), (0, 5), (5, 4), (6, 2)):
        edges[a, b] = True
    visible = edges.T | np.eye(length, dtype=bool)  # row i sees its predecessors and itself
    steps = distances(visible)
    assert steps[4, 0] == 2 and steps[3, 0] == 3 and steps[0, 4] == 99
    rows = length + 1  # row j has another token at node j
    batch = {name: values[:1].repeat(rows, 0) for name, values in puzzles(GRAPH, length=length).items()}
    batch["segment_ids"], batch["visible"] = np.ones((rows, length), np.int32), np.stack([visible] * rows)
    batch["tokens"] = np.zeros((rows, length), np.int32)
    batch["tokens"][np.arange(length), np.arange(length)] = 1
    params = drawn_params(GRAPH)
    for depth in (1, 2, 3):
        states = programs["graph"].state(params, batch, depth)
        moved = np.abs(states[:length] - states[length]).max(-1)  # [changed node, node]
        np.testing.assert_array_equal(moved.T > 0, steps <= depth)


def test_texts_see_both_ways_and_no_padding(programs):
    """Every real token changes every state of its row; padding changes none of them."""
    params, batch = drawn_params(form("text")), puzzles(form("text"))
    before, real = programs["text"].state(params, batch, 1), batch["segment_ids"] > 0
    for place in range(real.shape[1]):
        tokens = batch["tokens"].copy()
        tokens[:, place] = (tokens[:, place] + 1) % GRAPH.vocab_size
        after = programs["text"].state(params, {**batch, "tokens": tokens}, 1)
        moved = (np.abs(after - before).max(-1) > 0) & real
        np.testing.assert_array_equal(moved, real & real[:, place : place + 1])


def test_positions_are_relative_or_none(programs):
    """RoPE knows distances only; a graph's nodes can be put in any order."""
    params, batch = drawn_params(form("text")), puzzles(form("text"))
    before = programs["text"].of_all(params, batch)
    shifted = programs["text"].of_all(params, {**batch, "positions": batch["positions"] + 11})
    stretched = programs["text"].of_all(params, {**batch, "positions": batch["positions"] * 2})
    np.testing.assert_allclose(shifted, before, atol=1e-4)
    assert np.abs(stretched - before)[:, :3].max() > 1e-3
    params, batch = drawn_params(GRAPH), puzzles(GRAPH)
    order = np.random.default_rng(3).permutation(batch["tokens"].shape[1])
    mixed = {name: batch[name][:, order] for name in ("tokens", "segment_ids", "targets", "loss_mask")}
    mixed |= {"visible": batch["visible"][:, order][:, :, order], "read": np.argsort(order)[batch["read"]]}
    mixed["positions"] = batch["positions"]
    found = programs["graph"].of_all(params, mixed)
    np.testing.assert_allclose(found, programs["graph"].of_all(params, batch), atol=1e-4)


def test_parameters_are_those_of_the_paper():
    """Cores of 165,376 and 921,600, the model for graphs 201,474; the program holds as many, and as many products."""
    graph = DepthRecurrentConfig()
    text = DepthRecurrentConfig(
        hidden_size=256, heads=8, mlp_size=1024, layer_scale=1e-4, positions="rope", readout="cls", max_depth=28
    )
    for config, wanted in ((graph, 165_376), (text, 921_600)):
        core = build(config).boxed["core"]
        assert sum(leaf.size for leaf in jax.tree.leaves(core)) == wanted
        count = program.count(config, 16)
        assert count == program.expected(config, 16)
        assert count.parameters < 1_000_000
    counts = analytic.parameters(build(graph))
    assert sum(counts.values()) == 201_474
    assert (counts["embedding"] + counts["depth embedding"], counts["head"]) == (2_944, 33_154)


def test_thinking_steps_are_drawn_uniformly():
    """A pure function of the key, from depth_min to depth, both included; one number for all rows."""
    family = build(form("graph", depth=5, depth_min=2))
    draw = jax.jit(lambda key: family.draw(key, jnp.int32(0), 8).depth)
    keys = jax.random.split(jax.random.key(0), 400)
    found = np.asarray(jax.vmap(draw)(keys))
    np.testing.assert_array_equal(found[:5], [draw(key) for key in keys[:5]])
    shares = np.bincount(found, minlength=6)[2:] / len(found)
    assert found.min() == 2 and found.max() == 5 and np.abs(shares - 0.25).max() < 0.07


def test_the_label_is_at_the_first_position_that_is_read(programs):
    its, params, batch = programs["graph"], drawn_params(GRAPH), puzzles(GRAPH)
    batch["read"] = batch["read"][:, ::-1].copy()  # the label moves along
    places = np.arange(len(batch["read"])), batch["read"][:, 0]
    label = batch["targets"][:, 0].copy()
    batch["targets"][:], batch["targets"][places] = 7, label
    batch["loss_mask"] = np.zeros_like(batch["loss_mask"])
    batch["loss_mask"][places] = [True, True, True, False]
    (loss, (logged, _, logits, (losses, correct))), _ = its.of_one(params, batch, 2)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(losses[places], -log_softmax[np.arange(4), label], rtol=1e-5)
    np.testing.assert_array_equal(correct[places], np.argmax(logits, -1) == label)
    np.testing.assert_allclose(loss, losses[places][:3].sum(), rtol=1e-6)
    assert logged["accuracy"] == correct[places][:3].sum()
    np.testing.assert_allclose(accuracy_by_depth(np.asarray(logits)[None], label), [correct[places].mean()])


def test_dropout_is_training_s_alone():
    """Without keys nothing is dropped; with them rows differ, and a row's draws are its own."""
    config = form("graph", dropout=0.5)
    family, params = build(config), drawn_params(config)
    batch = {name: values[:1].repeat(4, 0) for name, values in puzzles(config).items()}
    assert family.flags.random and not build(GRAPH).flags.random

    @jax.jit
    def state(params, batch, key):
        return forward(family, params, {}, batch, 2, key=key).state

    evaluated = state(params, batch, None)
    np.testing.assert_array_equal(evaluated[0], evaluated[1])
    plain = Programs(form("graph")).state(params, batch, 2)
    np.testing.assert_allclose(evaluated, plain, atol=1e-6)
    drawn = state(params, batch, jax.random.key(1))
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3
    swapped = state(params, {**batch, "rows": np.array([1, 0, 2, 3])}, jax.random.key(1))
    np.testing.assert_allclose(swapped[:2], drawn[1::-1], atol=1e-6)


def test_dropped_shares_and_their_scale():
    """A share of the numbers is zero and the rest is divided by what is left, anew at every depth and place."""
    from dreamer_jax.blocks.dropout import dropout

    keys, x = jax.random.split(jax.random.key(0), 2), jnp.ones((2, 5000))
    found = np.asarray(dropout(x, 0.2, keys, jnp.int32(1), 0))
    assert set(np.unique(found)) == {0, np.float32(1.25)}
    np.testing.assert_allclose((found == 0).mean(-1), 0.2, atol=0.02)
    others = [dropout(x, 0.2, keys, jnp.int32(l), place) for l, place in ((2, 0), (1, 1))]
    assert all(0.25 < (found != other).mean() < 0.4 for other in others)  # 2 x 0.2 x 0.8
    np.testing.assert_array_equal(dropout(x, 0.2, None, jnp.int32(1), 0), x)


def test_bfloat16_keeps_the_state_in_float32(programs):
    """A fresh LayerScale of 1e-4 moves a state by less than bfloat16 can tell, and still does here."""
    config = form("text", dtype="bfloat16")
    params, batch = drawn_params(config), puzzles(config)
    for path in ("core.attention_scale.factor", "core.mlp_scale.factor"):
        params = changed(params, path, 1e-4)
    params = changed(changed(params, "depth_embedding", 0.0), "core.gate.bias", 1e4)
    found, wanted = (its.state(params, batch, 1) for its in (Programs(config), programs["text"]))
    start = params["embedding"][batch["tokens"]]
    moved, should = found - start, wanted - start
    assert found.dtype == np.float32 and 0 < np.abs(should).max() < 2**-9
    np.testing.assert_allclose(moved, should, atol=0.05 * np.abs(should).max())


def test_what_it_refuses():
    family = build(GRAPH)
    params, _ = initialise(family, jax.random.key(0))
    with pytest.raises(UserError, match="depth embeddings for 6 steps and can't think for 7"):
        family.check_depth(7)
    assert build(form("plain")).check_depth(700) == 700
    with pytest.raises(UserError, match="depth_recurrent doesn't generate text"):
        fold(GRAPH, params, {})
    batch: Any = puzzles(GRAPH)
    passed = forward(family, params, {}, batch, 1)
    with pytest.raises(UserError, match=r"set data\.source: puzzle"):
        family.loss(params, passed, {name: batch[name] for name in ("tokens", "targets", "loss_mask")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth_min": 5}, "model.depth_min: 5 is more than model.depth 4"),
        ({"depth": 7}, "model.max_depth: 6 depth embeddings are too few for model.depth 7"),
        ({"heads": 3}, "model.heads: 3 does not divide"),
        ({"dropout": 1.0}, "model.dropout: 1.0 is a share"),
        ({"heads": 16, "positions": "rope"}, "model.heads: 16 heads have an odd size, 1"),
        ({"mlp_size": 0}, "model.mlp_size: 0 is too small"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(GRAPH, **changes)
