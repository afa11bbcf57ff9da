"""Recursive transformers against a plain float64 version of their equations; training, early exit, counting."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dreamer_jax.blocks.low_rank import LowRank
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.budget import memory, program
from dreamer_jax.config.models.recursive import RecursiveConfig
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import build, depth_of, forward
from dreamer_jax.inference import Adaptive, Engine, fold
from dreamer_jax.inference.sharding import shard
from tests.families.cases import drawn_params, logits_in_flight, until_stopped
from tests.families.plain_recursive import PlainRecursive, softmax, wide

TINY = RecursiveConfig(
    depth=3,
    layers=2,
    hidden_size=16,
    heads=4,
    kv_heads=2,
    head_size=6,
    mlp_size=12,
    vocab_size=23,
    rank=3,
    share_norms=False,
    rope_base=100.0,
    norm_epsilon=1e-3,
    exit_weight=0.3,
    dtype="float32",
)
_TWICE = dataclasses.replace(TINY, depth=2, exit_weight=0.0)
FORMS = {
    "cycle": TINY,
    "sequence": dataclasses.replace(
        _TWICE, sharing="sequence", queries="head_norm", rope_factor=8.0, rope_low=0.3, rope_high=1.5, rope_length=12
    ),
    "middle_cycle": dataclasses.replace(_TWICE, sharing="middle_cycle", form="branch_norm", queries="norm"),
    "plain": dataclasses.replace(_TWICE, rank=0, share_norms=True, tied_head=True),
}
"""Every order of layers, every arrangement of norms, with and without what relaxes them."""
ROWS, LENGTH = 2, 6
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiles quickly; programs of this size run fast enough."""
RNG = np.random.default_rng(0)
TOKENS, TARGETS = (RNG.integers(0, 23, (ROWS, LENGTH)).astype(np.int32) for _ in range(2))
MASK = RNG.random((ROWS, LENGTH)) < 0.7
BATCH = {"tokens": TOKENS, "targets": TARGETS, "loss_mask": MASK}


@functools.cache
def passing(config):
    """params -> (loss, what it logs, states of every loop, logits) and the gradient, jitted."""
    family = build(config)

    def loss(params):
        passed = forward(family, params, {}, BATCH)
        value, logged = family.loss(params, passed, BATCH)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return value, (logged, passed.outputs, family.logits(params, hidden))

    return jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def passed(form):
    return passing(FORMS[form])(drawn_params(FORMS[form]))


@functools.cache
def whole(config):
    """params -> logits [B, S, V], jitted."""
    family = build(config)

    def logits(params):
        passed = forward(family, params, {}, BATCH)
        return family.logits(params, family.readout(params, passed.state, passed.memory, passed.context)[0])

    return jit(logits)


@functools.cache
def plainly(form):
    """Logits [B, S, V], loops, states [loops, B, S, h] by the equations."""
    config = FORMS[form]
    rows = [PlainRecursive(config, wide(drawn_params(config))).row(tokens) for tokens in TOKENS]
    logits, loops, states = zip(*rows, strict=True)
    return np.stack(logits), np.stack(loops), np.stack(states, 1)


def cross_entropy(logits):
    picked = np.take_along_axis(logits, np.broadcast_to(TARGETS[..., None], (*logits.shape[:-1], 1)), -1)[..., 0]
    return ((np.log(np.exp(logits).sum(-1)) - picked) * MASK).sum((-1, -2))


# A pass and its loss.


@pytest.mark.slow_but("middle_cycle", "sequence", "plain")
@pytest.mark.parametrize("form", FORMS)
def test_a_pass_is_that_of_the_equations(form):
    known = passed(form)[0][1][2] if form in ("cycle", "sequence") else whole(FORMS[form])(drawn_params(FORMS[form]))
    np.testing.assert_allclose(known, plainly(form)[0], atol=1e-4)


def test_the_loss_reads_every_loop():
    """L_3 + 0.3 (L_1 + L_2), each through the one final norm and head."""
    (loss, (logged, outputs, _)), _ = passed("cycle")
    _, _, states = plainly("cycle")
    np.testing.assert_allclose(outputs, states, atol=2e-5)
    losses = cross_entropy(PlainRecursive(TINY, wide(drawn_params(TINY))).read(states))
    np.testing.assert_allclose(loss, losses[2] + 0.3 * (losses[0] + losses[1]), rtol=1e-5)
    np.testing.assert_allclose(logged["last_loss"], losses[2], rtol=1e-5)


def test_a_pass_of_one_loop_has_no_earlier_ones_to_read():
    family, params = build(TINY), drawn_params(TINY)

    def losses(params):
        passed = forward(family, params, {}, BATCH, 1)
        return family.loss(params, passed, BATCH)[0]

    read = PlainRecursive(TINY, wide(params)).read(plainly("cycle")[2][0])
    np.testing.assert_allclose(jit(losses)(params), cross_entropy(read), rtol=1e-5)


def unrolled(config):
    """The loss as a plain loop with plain formulas, for autodiff."""
    family = build(config)

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
        context = Context(jnp.ones_like(positions), positions)
        x, memory = family.enter(params, BATCH, family.fresh(ROWS, LENGTH, 1), context)
        total = 0.0
        for l in range(family.depth):
            x, *_ = family.step(
                family.weights(params).at(jnp.int32(l)), x, (), depth_of(l, family.depth), memory, context
            )
            logits = family.logits(params, family.readout(params, x, memory, context)[0])
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), TARGETS[..., None], -1)[..., 0]
            weight = 1 if l == family.depth - 1 else config.exit_weight
            total += weight * jnp.sum(losses * MASK)
        return total

    return jit(jax.value_and_grad(loss))


def test_gradients_are_those_of_an_unrolled_loop():
    loss, wanted = unrolled(TINY)(drawn_params(TINY))
    (found, _), gradients = passed("cycle")
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-5), gradients, wanted)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_gradients_of_layers_repeated_in_place():
    """Along a random direction of every leaf, against differences of the plain float64 loss."""
    config = FORMS["sequence"]
    params, (_, gradients) = wide(drawn_params(config)), passed("sequence")
    rng, leaves = np.random.default_rng(3), jax.tree.leaves(params)
    for leaf, gradient in zip(leaves, jax.tree.leaves(gradients), strict=True):
        direction, losses = rng.normal(size=leaf.shape), []
        for step in (1e-5, -2e-5):
            leaf += step * direction
            losses.append(cross_entropy(np.stack([PlainRecursive(config, params).row(row)[0] for row in TOKENS])))
        leaf += 1e-5 * direction
        slope = (losses[0] - losses[1]) / 2e-5
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-4, atol=1e-4)


def test_training_starts_at_the_shared_matrices():
    """B of a LoRA is zero, and A isn't; every application has its own, at most of a matrix's own rank."""
    block = LowRank(REFERENCE, 6, 2, 3, parent=None)
    drawn = nn.meta.unbox(block.init(jax.random.key(0), jnp.zeros((1, 6))))["params"]
    assert drawn["down"].shape == (6, 2) and 0.1 < np.std(drawn["down"]) < 1 and not np.any(drawn["up"])
    relaxation = build(TINY).shapes[0]["relaxation"]
    sizes = jax.tree.map(jnp.shape, nn.meta.unbox(relaxation))["1"]
    assert sizes["attention"]["q_low"] == {"down": (3, 16, 3), "up": (3, 3, 24)}
    assert sizes["attention_norm"]["scale"] == (3, 16)


# Decoding.


@functools.cache
def folded(form):
    return fold(FORMS[form], drawn_params(FORMS[form]), {})


def test_positions_at_different_depths():
    """Position i is at depth t - i at time t: each comes to what the pass over the row says. Here every matrix, LoRA
    and norm differs between depths."""
    model = folded("sequence")
    places = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    found = logits_in_flight(model, jnp.asarray(TOKENS), places, model.empty_slots(ROWS, LENGTH))
    np.testing.assert_allclose(found, plainly("sequence")[0], atol=1e-4)


RULES = {
    "sure": {"exit_confidence": 0.15, "refill": "propagate"},
    "settled": {"exit_change": 0.5, "refill": "share"},
}


@pytest.mark.slow_but("sure")
@pytest.mark.parametrize("rule", RULES)
def test_a_token_stops_where_the_rule_says(rule):
    """One after the other, by the equations: states, loops, and what later tokens see of loops that were left out."""
    config = dataclasses.replace(TINY, **RULES[rule])
    params = drawn_params(TINY)
    model = fold(config, params, {})
    slots, prompt = model.empty_slots(ROWS, LENGTH), 0
    rows = [PlainRecursive(config, wide(params)).row(tokens, prompt) for tokens in TOKENS]
    wanted, loops = (np.stack(each) for each in list(zip(*rows, strict=True))[:2])
    assert len(np.unique(loops)) > 1 and (np.diff(loops) > 0).any(), loops
    for place in range(LENGTH):
        places = jnp.full((ROWS, 1), place)
        logs, slots, depths = until_stopped(model, TOKENS[:, place, None], places, slots)
        np.testing.assert_array_equal(depths, loops[:, place])
        np.testing.assert_allclose(logs, jax.nn.log_softmax(wanted[:, place]), atol=1e-4)
    assert np.abs(wanted - plainly("cycle")[0]).max() > 1e-2


def test_the_engine_generates_what_the_whole_pass_says():
    """Without a rule all tokens go through all loops; with one the engine asks for it."""
    model, prompt = folded("middle_cycle"), [1, 5, 6]
    config = FORMS["middle_cycle"]
    row = Engine(model).generate([prompt], 4)[0]
    plain = PlainRecursive(config, wide(drawn_params(config))).row([*prompt, *row.tokens])[0]
    assert row.tokens == plain.argmax(-1)[2:6].tolist() and row.depths[1:] == [2, 2, 2]
    assert not Engine(model).exits_early
    assert Engine(fold(dataclasses.replace(TINY, exit_change=0.1), drawn_params(TINY), {})).exits_early
    assert Engine(
        folded("cycle"), sampler=Adaptive(threshold=0.1)
    ).exits_early  # loops, though each has weights of its own
    with pytest.raises(UserError, match="early exit needs the same weights at every depth, or keys"):
        Engine(folded("sequence"), sampler=Adaptive(threshold=0.1))


def test_rules_to_stop_by():
    """Confidence is the difference of the two largest probabilities, change is relative to the new state."""
    params = drawn_params(TINY)
    x, before = RNG.normal(size=(2, 1, 4, 16)).astype(np.float32)
    top = np.sort(softmax(PlainRecursive(TINY, wide(params)).read(np.float64(x))), -1)
    gap = (top[..., -1] - top[..., -2])[0]
    change = (np.linalg.norm(x - before, axis=-1) / np.linalg.norm(x, axis=-1))[0]

    def finished(**settings):
        family: Any = build(dataclasses.replace(TINY, **settings))
        return family.finished(params, x, before, depth_of(0, 3))

    for threshold in np.sort(gap)[:3]:
        np.testing.assert_array_equal(finished(exit_confidence=float(threshold) + 1e-5)[0], gap > threshold + 1e-5)
    for threshold in np.sort(change)[:3]:
        np.testing.assert_array_equal(finished(exit_change=float(threshold) + 1e-5)[0], change < threshold + 1e-5)
    assert finished() is None


def test_how_deep_it_can_go():
    """Loops that are all the same can go on; those with weights of their own can't."""
    assert build(FORMS["plain"]).check_depth(9) == 9
    for form, said in (("cycle", "each of the 3 loops has weights of its own"), ("sequence", "can't be applied")):
        with pytest.raises(UserError, match=said):
            build(FORMS[form]).check_depth(4)


def test_generation_on_a_mesh_divides_nothing_that_must_be_whole():
    """Stacked matrices and LoRA know no parts of F: every device has everything. Without them F is divided."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "expert"))
    for form in ("sequence", "cycle"):
        model, sharding = shard(folded(form), mesh)
        assert all(spec == PartitionSpec() for spec in sharding.specs) and model.family == folded(form).family
    assert any("expert" in spec for spec in shard(folded("plain"), mesh)[1].specs)


# Counting, and what is refused.


@pytest.mark.parametrize("form", FORMS)
def test_both_counters_agree(form):
    config = dataclasses.replace(FORMS[form], depth=4, mlp_size=40, exit_weight=0.0)
    found = program.count(config, 24)
    assert found == program.expected(config, 24)
    h, n, kv, f, r = 16, 24, 12, 40, 3
    matrices, ends = h * (2 * n + 2 * kv) + 3 * h * f, 2 * (form == "middle_cycle")
    norms = 2 * h + {"sequence": 12, "middle_cycle": n + kv}.get(form, 0)
    low = r * (h + n + 2 * (h + kv) + n + h + 3 * (h + f))
    relaxed = form != "plain"
    applied = 8 * (norms + low) if relaxed else 2 * norms
    tables = 23 * h * (1 if form == "plain" else 2) + h
    assert found.parameters == (2 + ends) * matrices + ends * norms + applied + tables
    assert memory.caches(build(config), 10)["layers cache"] == 8 * 10 * 2 * kv * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_heads": 3}, "3 does not divide"),
        ({"head_size": 7}, "7 is odd"),
        ({"rank": -1}, "too small"),
        ({"rope_factor": 0.0}, "too small"),
        ({"rope_low": 4.0}, "model.rope_low: 4 is not below model.rope_high"),
        ({"exit_confidence": 1.5}, "1.5 is no probability"),
        ({"sharing": "middle_cycle"}, "model.exit_weight: reads the head after every loop.* use cycle"),
        ({"sharing": "sequence", "exit_weight": 0.0, "exit_change": 0.1}, "model.exit_change: compares loops"),
    ],
)
def test_settings_that_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **change)
