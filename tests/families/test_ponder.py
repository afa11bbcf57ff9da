"""PonderLM against a plain float64 version of its equations, its limits, decoding and counting."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks import loss as loss_block
from dreamer_jax.blocks.memory import Context, Fresh, Memory
from dreamer_jax.blocks.pondering import expected_embedding
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.config.models.ponder import PonderConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build, depth_of, forward
from dreamer_jax.families.nearby import step_near
from dreamer_jax.families.ponder import Pondered
from dreamer_jax.inference import Engine, fold
from tests.families.cases import drawn_params, logits_in_flight
from tests.families.plain_ouro import PlainOuro, wide

TINY = PonderConfig(
    depth=3,
    layers=2,
    hidden_size=16,
    heads=4,
    kv_heads=2,
    head_size=6,
    mlp_size=12,
    vocab_size=23,
    dtype="float32",
)
RNG = np.random.default_rng(0)
TOKENS, TARGETS = (RNG.integers(0, 23, (2, 7)).astype(np.int32) for _ in range(2))
BATCH = {"tokens": TOKENS, "targets": TARGETS, "loss_mask": RNG.random((2, 7)) < 0.7}


class PlainPonder(PlainOuro):
    """Attention, norms and rotations of the plain Ouro; no norms behind branches, and the way back."""

    def row(self, tokens: Any, loops: int) -> Any:  # type: ignore[override]
        """h_t of every pass, [L, S, h]."""
        table, head = self.params["embedding"], self.params["head"]
        inputs = [np.array(table[token]) for token in tokens]
        states = np.zeros((loops, len(tokens), self.config.hidden_size))
        for t in range(loops):
            for position in range(len(tokens)):
                states[t, position] = self.passed(inputs[position], position, t)
                scores = head @ states[t, position]
                shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                inputs[position] = inputs[position] + sum(p * row for p, row in zip(shares, table, strict=True))
        return states

    def passed(self, x: Any, position: int, t: int) -> Any:
        """x_t -> h_t."""
        for j in range(self.config.layers):
            layer = self.params["layers"][str(j)]
            x = x + self.attention(layer["attention"], self.norm(x, layer["attention_norm"]), position, (t, j))
            normed = self.norm(x, layer["mlp_norm"])
            gate, up = (layer["feed_forward"][name] @ normed for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["feed_forward"]["out"]
        return self.norm(x, {"scale": self.params["final_norm"]})

    def of(self, place: tuple[int, int], position: int, own: bool) -> Any:
        """Every pass has keys of its own."""
        return self.kept[place][position]


@functools.cache
def passing(config=TINY):
    """params, batch -> (loss, logits) and the gradient."""
    family = build(config)

    def loss(params, batch):
        passed = forward(family, params, {}, batch)
        value, _ = family.loss(params, passed, batch)
        return value, family.logits(params, passed.state.h)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def plain_logits():
    params = wide(drawn_params(TINY))
    rows = [PlainPonder(TINY, params).row(tokens, TINY.depth) for tokens in TOKENS]
    return np.stack(rows, axis=1) @ params["head"].T  # [L, B, S, V]


def test_forward_and_loss_are_those_of_the_equations():
    (loss, logits), _ = passing()(drawn_params(TINY), BATCH)
    wanted = plain_logits()
    np.testing.assert_allclose(logits, wanted[-1], atol=1e-4)
    picked = np.take_along_axis(wanted[-1], TARGETS[..., None], -1)[..., 0]
    losses = np.log(np.exp(wanted[-1]).sum(-1)) - picked
    np.testing.assert_allclose(loss, (losses * BATCH["loss_mask"]).sum(), rtol=1e-5)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1


def test_gradients_are_those_of_the_unrolled_passes():
    """Also those of the embedding and the head, through which every prediction comes back."""
    family = build(TINY)
    ones, places = jnp.ones((2, 7), jnp.int32), jnp.broadcast_to(jnp.arange(7), (2, 7))

    def unrolled(params):
        x, context = params["embedding"][TOKENS], Context(ones, places)
        for _ in range(TINY.depth):
            its = family.step(family.weights(params), Pondered(x, x), (), depth_of(0, 3), Memory(Fresh()), context)
            logits = its.state.h @ params["head"].T
            x = x + jax.nn.softmax(logits) @ params["embedding"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), TARGETS[..., None], -1)[..., 0]
        return -jnp.sum(picked * BATCH["loss_mask"])

    wanted = jax.jit(jax.grad(unrolled))(drawn_params(TINY))
    _, found = passing()(drawn_params(TINY), BATCH)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-5), found, wanted)


def test_the_jacobian_is_that_of_one_input_by_the_one_before():
    """x_{t+1} by x_t: a thought is of it, though it is the next pass that has it."""
    family, params = build(TINY), drawn_params(TINY)
    ones, weights = jnp.ones((1, 2), jnp.int32), family.weights(params)
    context = Context(ones, jnp.arange(2)[None])
    x, h = jnp.asarray(RNG.normal(size=(2, 1, 2, 16)), jnp.float32)
    after, nothing = step_near(family, weights, Pondered(x, h), (), depth_of(1, 3), Memory(Fresh()), context)

    def following(x):
        h = family.step(weights, Pondered(x, x), (), depth_of(0, 3), Memory(Fresh()), context).state.h
        return x + jax.nn.softmax(h @ params["head"].T) @ params["embedding"]

    input_ = x + jax.nn.softmax(h @ params["head"].T) @ params["embedding"]
    found, wanted = jax.jit(jax.jacrev(after))(nothing), jax.jit(jax.jacrev(following))(input_)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(wanted.reshape(32, 32) - np.eye(32)).max() > 0.1


def test_limits():
    """One pass is an ordinary transformer, whose loss says nothing of pondering; a certain prediction brings back the
    row of that token."""
    params = drawn_params(TINY)
    (_, logits), gradient = passing(dataclasses.replace(TINY, depth=1))(params, BATCH)
    np.testing.assert_allclose(logits, plain_logits()[0], atol=1e-4)
    seen = np.unique(TOKENS)
    assert np.any(gradient["embedding"][seen]) and not np.any(np.delete(gradient["embedding"], seen, 0))
    table, head = params["embedding"], np.eye(23, 16, dtype=np.float32) * 100
    certain = expected_embedding(jnp.eye(16)[None], head, table)[0]
    np.testing.assert_allclose(certain, table[:16], atol=1e-5)
    np.testing.assert_allclose(expected_embedding(jnp.zeros((1, 1, 16)), head, table)[0, 0], table.mean(0), atol=1e-5)


def test_chunks_change_nothing(monkeypatch):
    """Seven tokens at once, and two; values and gradients."""
    params = drawn_params(TINY)

    def found(hidden):
        return expected_embedding(hidden, params["head"], params["embedding"])

    hidden, d_out = RNG.normal(size=(2, 1, 7, 16)).astype(np.float32)
    whole, back = jax.vjp(found, hidden)
    monkeypatch.setattr(loss_block, "CHUNK_ROWS", 2)
    monkeypatch.setattr(loss_block, "CHUNK_ELEMENTS", 1)
    cut, back_cut = jax.vjp(found, hidden)
    np.testing.assert_allclose(cut, whole, atol=1e-6)
    np.testing.assert_allclose(back_cut(d_out)[0], back(d_out)[0], atol=1e-5)


def test_decoding_is_the_whole_pass():
    """Greedy tokens through the caches are the likeliest of the whole pass; positions at depths of their own."""
    model = fold(TINY, drawn_params(TINY), {})
    prompts = [[1, 5, 6], [2, 7, 8, 9, 11]]
    whole = jax.jit(lambda tokens: forward(model.family, model.params, {}, {"tokens": tokens}).state.h)
    for prompt, row in zip(prompts, Engine(model).generate(prompts, 5), strict=True):
        tokens = np.zeros((1, 10), np.int32)
        tokens[0, : len(prompt) + 5] = prompt + row.tokens
        likeliest = np.asarray(model.logits(whole(tokens))[0].argmax(-1))
        assert row.tokens == likeliest[len(prompt) - 1 : len(prompt) + 4].tolist()
    places = jnp.broadcast_to(jnp.arange(7), (2, 7))
    found = logits_in_flight(model, TOKENS, places, model.empty_slots(2, 7))
    np.testing.assert_allclose(found, plain_logits()[-1], atol=1e-4)


def test_both_counters_agree():
    config = dataclasses.replace(TINY, depth=5, mlp_size=40)
    found = program.count(config, 24)
    assert found == program.expected(config, 24)
    layer = 2 * 16 * (4 + 2) * 6 + 3 * 16 * 40 + 2 * 16
    assert found.parameters == 2 * 23 * 16 + 2 * layer + 16
    assert memory.caches(build(config), 10) == {"layers cache": 5 * 2 * 10 * 2 * 2 * 6 * 2}


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_training_at_another_depth_ponders_between_its_own_passes(passes):
    """And passes that aren't differentiated, the first of which doesn't ponder, cost less by what they are."""
    family, own = build(TINY), build(dataclasses.replace(TINY, depth=passes))
    whole = analytic.training_flops(family, 7, [analytic.Work(1.0, passes, passes)])
    assert whole == pytest.approx(analytic.training_flops(own, 7))
    without = analytic.training_flops(family, 7, [analytic.Work(1.0, passes, passes - 1)])
    layers = analytic.matmul_flops(own, context=4)["layers"] / passes
    assert whole[0] - without[0] == pytest.approx(2 * layers)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"kv_heads": 3}, "3 does not divide"), ({"head_size": 7}, "7 is odd"), ({"depth": 0}, "too small")],
)
def test_settings_that_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **change)
