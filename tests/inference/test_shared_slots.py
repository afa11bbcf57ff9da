"""Decoding a model whose positions stop at different recurrences, against plain dictionaries of keys and values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build, depth_of
from dreamer_jax.inference import Adaptive, Engine, fold
from tests.families.test_huginn import FORMS, drawn_params, plain_forward, plain_norm, turned

CONFIG = FORMS["huginn"]
LENGTH, DEEPEST = 8, 5
VARYING = [3, 1, 5, 2, 4, 1, 5, 3]
CONSTANT = [4] * LENGTH


@pytest.fixture(scope="module")
def model():
    """Parameters, tokens, and the states that positions start from."""
    params = drawn_params(CONFIG)
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, LENGTH)
    positions = jnp.arange(LENGTH)[None]
    entered = jnp.zeros((1, LENGTH, CONFIG.hidden_size))
    s0 = build(CONFIG).start(entered, Context(jnp.ones_like(positions), positions))
    return params, tokens, np.asarray(s0, np.float64)[0]


@pytest.mark.slow_but("varying-full", "constant-latest", "varying-compress-s2", "varying-always-last")
@pytest.mark.parametrize("rule", ["full", "latest", "always-last", "compress-s2", "compress-s4"])
@pytest.mark.parametrize("depths", [VARYING, CONSTANT], ids=["varying", "constant"])
def test_rules_of_the_cache(model, rule, depths):
    params, tokens, s0 = model
    config = dataclasses.replace(CONFIG, cache=rule)
    found = decoded(config, params, tokens, depths)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    np.testing.assert_allclose(found, Plain(config, wide, rule).logits(tokens, s0, depths), atol=1e-4)
    if depths == CONSTANT and not rule.startswith("compress"):
        whole = plain_forward(config, wide, tokens[None], depths[0], s0[None])[0]
        np.testing.assert_allclose(found, whole, atol=1e-4)


@pytest.mark.slow
def test_rows_divided_over_devices(model):
    """A rule that counts recurrences, with rows on two devices that stop early by themselves."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    folded = fold(dataclasses.replace(CONFIG, cache="full"), model[0], {}, DEEPEST)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    prompts = [[1, 5, 6], [2, 7, 8, 9]]
    alone, spread = (
        Engine(folded, sampler=Adaptive(threshold=0.3), mesh=its).generate(prompts, 4) for its in (None, mesh)
    )
    assert [(row.tokens, row.depths) for row in spread] == [(row.tokens, row.depths) for row in alone]


def decoded(config, params, tokens, depths):
    """Logits [S, V] of one token after the other, each at its own number of recurrences."""
    folded = fold(config, params, {}, DEEPEST)
    slots = folded.empty_slots(1, LENGTH)

    @jax.jit
    def one(token, position, depth, slots):
        token, position = token.reshape(1, 1), position.reshape(1, 1)
        flight, slots = folded.enter(token, position, slots)
        flight, slots = jax.lax.fori_loop(
            0, depth, lambda l, carry: folded.step(carry[0], position, l, carry[1]), (flight, slots)
        )
        hidden, slots = folded.leave(flight, position, slots)
        slots = folded.family.refill(folded.params, flight.state, slots, (depth - 1).reshape(1), position[0])
        return folded.logits(hidden)[0, 0], slots

    rows = []
    for position, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
        logits, slots = one(jnp.int32(token), jnp.int32(position), jnp.int32(depth), slots)
        rows.append(logits)
    return np.stack(rows)


class Plain:
    """One position after the other; keys and values in dictionaries by (stack, layer), number and position."""

    def __init__(self, config, params, rule):
        self.config, self.params, self.rule, self.kept = config, params, rule, {}
        size = int(rule.rpartition("-s")[2]) if rule.startswith("compress") else 0
        self.ring = size // config.core_layers

    def logits(self, tokens, s0, depths):
        """[S, V]."""
        config, params, rows = self.config, self.params, []
        for position, depth in enumerate(depths):
            e = params["embedding"][tokens[position]] * config.hidden_size**0.5
            for j, layer in params["prelude"].items():
                e = self.layer(layer, e, position, ("prelude", j), 0)
            s = s0[position]
            for l in range(depth):
                s = np.concatenate([s, e]) @ params["adapter"]
                for j, layer in params["core"].items():
                    s = self.layer(layer, s, position, ("core", j), l)
            x = plain_norm(config, s, params["final_norm"])
            for j, layer in params["coda"].items():
                x = self.layer(layer, x, position, ("coda", j), 0)
            rows.append(plain_norm(config, x, params["final_norm"]) @ params["embedding"].T)
        return np.stack(rows)

    def layer(self, layer, x, position, name, l):
        def norm(which, x):
            return plain_norm(self.config, x, layer[which]["scale"])

        attended = self.attention(layer["attention"], norm("attention_norm", x), position, name, l)
        x = norm("attention_out_norm", x + attended)
        gate, up = (layer["feed_forward"][name] @ norm("mlp_norm", x) for name in ("gate", "up"))
        branch = (gate / (1 + np.exp(-gate)) * up) @ layer["feed_forward"]["out"]
        return norm("mlp_out_norm", x + branch)

    def attention(self, weights, x, position, name, l):
        c = self.config
        n, kv, d = c.heads, c.kv_heads, c.head_size
        q, k, v = np.split(x @ weights["qkv"], [n * d, (n + kv) * d])
        q, k = q + weights["q_bias"], k + weights["k_bias"]
        keys = np.stack([turned(k[h * d : h * d + d], position, c.rope_base) for h in range(kv)])
        number = l % self.ring if self.ring and name[0] == "core" else l
        self.kept.setdefault(name, {}).setdefault(number, {})[position] = keys, v.reshape(kv, d)
        seen = self.seen(self.kept[name], number, position)
        out = []
        for h in range(n):
            query = turned(q[h * d : h * d + d], position, c.rope_base)
            scores = np.array([query @ key[h * kv // n] for key, _ in seen]) / np.sqrt(d)
            shares = np.exp(scores - scores.max())
            out.append(shares / shares.sum() @ np.stack([value[h * kv // n] for _, value in seen]))
        return np.concatenate(out) @ weights["out"]

    def seen(self, kept, number, position):
        """By the words of the rule."""
        everybody = range(position + 1)
        if self.rule == "full":
            return [kept[number][p] for p in everybody if p in kept[number]]
        complete = all(p in kept[number] for p in everybody)
        found = []
        for p in everybody:
            there = [l for l in kept if p in kept[l] and (self.rule == "always-last" or l <= number)]
            found.append(kept[number if complete else max(there)][p])
        return found


@pytest.mark.slow_but("always-last")
@pytest.mark.parametrize("rule", ["full", "latest", "always-last", "compress-s4"])
def test_one_step_for_positions_at_different_recurrences(model, rule):
    """Positions 5 and 6 at recurrences 1 and 3 in one step get what they get one after the other."""
    params, tokens, _ = model
    folded = fold(dataclasses.replace(CONFIG, cache=rule), params, {}, DEEPEST)
    slots = filled(folded, tokens)
    state = jax.random.normal(jax.random.key(4), (1, 2, CONFIG.hidden_size))
    positions, depths = jnp.array([[5, 6]]), jnp.array([[1, 3]])
    flight, _ = folded.enter(jnp.asarray(tokens[None, 5:7]), positions, slots)
    both, _ = folded.step(flight._replace(state=state), positions, depths, slots)
    for i in range(2):
        part = flight._replace(state=state[:, i : i + 1], inputs=flight.inputs[:, i : i + 1])
        one, slots = folded.step(part, positions[:, i : i + 1], int(depths[0, i]), slots)
        np.testing.assert_allclose(both.state[:, i], one.state[:, 0], atol=1e-5)


def test_positions_outside_of_the_slots_count_as_nothing():
    """With always-last, which looks whether any position lacks a recurrence: one that leaves no keys is none."""
    slots = SharedSlots.empty(1, 3, 1, 4, 1, 2, "float32", "always-last")
    drawn = jax.random.normal(jax.random.key(0), (3, 3, 1, 2, 1, 2))
    for l in range(3):
        places = Context(jnp.ones((1, 2)), jnp.array([[0, 1]]))
        _, slots = slots.attend(*drawn[l], depth_of(l, 3), places, REFERENCE)

    def seen(*places):
        parts = (part[:, 1:].repeat(len(places), axis=1) for part in drawn[1])
        context = Context(jnp.ones((1, len(places))), jnp.array([places]))
        return slots.attend(*parts, depth_of(1, 3), context, REFERENCE)[0][0, 0]

    np.testing.assert_allclose(seen(1, 1 << 30), seen(1), atol=1e-6)


def filled(folded, tokens):
    """Slots after all positions went through all recurrences."""
    slots = folded.empty_slots(1, LENGTH)
    positions = jnp.arange(LENGTH)[None]
    flight, slots = folded.enter(jnp.asarray(tokens[None]), positions, slots)
    for l in range(DEEPEST):
        flight, slots = folded.step(flight, positions, l, slots)
    return slots


@pytest.mark.parametrize(
    ("rule", "said"), [("compress-r4", "different layers"), ("compress-s3", "no multiple"), ("newest", "unknown rule")]
)
def test_rules_that_are_refused(rule, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(CONFIG, cache=rule)
