"""Ouro against the outputs of its official code, and against a plain float64 version of its equations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.observation import observe_batch
from dreamer_jax.blocks.memory import Context
from dreamer_jax.config.models.ouro import OuroConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.export.ouro import params_of
from dreamer_jax.families import build, depth_of, forward
from dreamer_jax.families.ouro import Looped, exit_distribution, gate_losses
from tests.families.cases import drawn_params
from tests.families.plain_ouro import PlainOuro, exit_shares, wide
from tests.outside import official_outputs

OFFICIAL = OuroConfig(
    depth=4,
    layers=3,
    hidden_size=64,
    heads=4,
    kv_heads=4,
    head_size=16,
    mlp_size=96,
    vocab_size=256,
    rope_base=1000.0,
    norm_epsilon=1e-3,
    dtype="float32",
)
TINY = OuroConfig(
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
MASK = RNG.random((2, 7)) < 0.7
BATCH = {"tokens": TOKENS, "targets": TARGETS, "loss_mask": MASK}


@functools.cache
def passing(config):
    """params, batch -> (states, gate logits, logits), and the loss with its gradient and what it logs."""
    family = build(config)

    def loss(params, batch):
        passed = forward(family, params, {}, batch)
        value, logged = family.loss(params, passed, batch)
        return value, (logged, *passed.outputs, family.logits(params, passed.outputs[0]))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_official_outputs():
    """Every loop's states, gate, exit probabilities and logits, and the loss of the first stage, all to 1e-4."""
    arrays, said = official_outputs("ouro_tiny")
    params = params_of({name[2:]: arrays[name] for name in arrays.files if name.startswith("w/")}, OFFICIAL)
    tokens = arrays["input_ids"]
    last = np.arange(12) == 11
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": ~np.stack([last, last])}
    (loss, (logged, states, gates, logits)), _ = passing(OFFICIAL)(params, batch)
    np.testing.assert_allclose(states, arrays["hidden_normed"], atol=1e-4)
    np.testing.assert_allclose(gates, arrays["gate_logit"], atol=1e-4)
    np.testing.assert_allclose(logits, arrays["logits_per_loop"], atol=1e-4)
    np.testing.assert_allclose(np.exp(np.moveaxis(exit_distribution(gates), 0, -1)), arrays["exit_p"], atol=1e-5)
    derived = next(value for key, value in said.items() if key.endswith("- 0.1 H(p)]"))
    np.testing.assert_allclose(loss / 22, derived, rtol=1e-5)
    np.testing.assert_allclose(logged["exit_entropy"] / 22, said["derived: mean entropy H(p)"], rtol=1e-5)


@functools.cache
def plainly(config):
    """States [R, B, S, h] and lambda [R, B, S] by the equations."""
    params = wide(drawn_params(config))
    rows = [PlainOuro(config, params).row(tokens, config.depth) for tokens in TOKENS]
    return [np.stack(each, axis=1) for each in zip(*rows, strict=True)]


def plain_losses(config, states):
    """CE_t [R, B, S] by the equations."""
    logits = states @ wide(drawn_params(config))["head"].T
    picked = np.take_along_axis(logits, np.broadcast_to(TARGETS[None, ..., None], (*states.shape[:3], 1)), -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - picked


def test_every_loop_is_that_of_the_equations():
    (_, (_, states, gates, logits)), _ = passing(TINY)(drawn_params(TINY), BATCH)
    wanted, lambdas = plainly(TINY)
    np.testing.assert_allclose(states, wanted, atol=2e-5)
    np.testing.assert_allclose(jax.nn.sigmoid(gates), lambdas, atol=1e-5)
    np.testing.assert_allclose(logits, wanted @ wide(drawn_params(TINY))["head"].T, atol=1e-4)


def test_the_first_stage_is_the_expected_loss_less_the_entropy():
    (loss, (logged, *_)), _ = passing(TINY)(drawn_params(TINY), BATCH)
    states, lambdas = plainly(TINY)
    p, losses = exit_shares(lambdas), plain_losses(TINY, states)
    entropy = -(p * np.log(p)).sum(0)
    np.testing.assert_allclose(loss, (((p * losses).sum(0) - 0.1 * entropy) * MASK).sum(), rtol=1e-5)
    np.testing.assert_allclose(logged["exit_entropy"], (entropy * MASK).sum(), rtol=1e-5)
    np.testing.assert_allclose(logged["exit_loop"], (np.einsum("l,lbs->bs", [1, 2, 3], p) * MASK).sum(), rtol=1e-5)


def unrolled(config):
    """The loss as a plain loop with plain formulas, for autodiff."""
    family = build(config)

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
        context = Context(jnp.ones_like(positions), positions)
        x, memory = family.enter(params, BATCH, family.fresh(2, 7, 1), context)
        state, left, total = family.start(x, context), jnp.ones((2, 7)), jnp.zeros((2, 7))
        for t in range(config.depth):
            state, _, (x, gate), _ = family.step(
                family.weights(params), state, (), depth_of(t, config.depth), memory, context
            )
            p = left * (jax.nn.sigmoid(gate) if t < config.depth - 1 else 1)
            left = left - p
            losses = -jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"].T), TARGETS[..., None], -1)[..., 0]
            total += p * losses + config.entropy_weight * p * jnp.log(p)
        return jnp.sum(total * MASK)

    return jax.jit(jax.value_and_grad(loss))


def test_gradients_are_those_of_an_unrolled_loop():
    params = drawn_params(TINY)
    loss, wanted = unrolled(TINY)(params)
    (found, _), gradients = passing(TINY)(params, BATCH)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-5), gradients, wanted)


def test_one_loop_is_an_ordinary_model():
    """Its loss is the cross-entropy, whatever the gate says."""
    config = dataclasses.replace(TINY, depth=1)
    (loss, (logged, *_)), gradients = passing(config)(drawn_params(config), BATCH)
    losses = plain_losses(config, plainly(config)[0])
    np.testing.assert_allclose(loss, (losses[0] * MASK).sum(), rtol=1e-5)
    assert logged["exit_entropy"] == 0 and not np.any(gradients["exit_gate"]["weight"])


def test_exit_probabilities():
    """They add up to one however sure the gate is; closed, everything is left to the last loop."""
    logits = jnp.asarray(RNG.normal(size=(5, 1000)) * np.geomspace(0.1, 60, 1000), jnp.float32)
    p = np.exp(np.asarray(exit_distribution(logits), np.float64))
    np.testing.assert_allclose(p.sum(0), 1, atol=3e-6)
    np.testing.assert_allclose(p, exit_shares(1 / (1 + np.exp(-np.asarray(logits, np.float64)))), atol=1e-6)
    np.testing.assert_array_equal(np.exp(exit_distribution(jnp.full((4, 1), -200.0)))[:, 0], [0, 0, 0, 1])
    np.testing.assert_array_equal(np.exp(exit_distribution(jnp.full((4, 1), 200.0)))[:, 0], [1, 0, 0, 0])


def test_a_large_entropy_weight_makes_all_loops_alike():
    losses = jnp.asarray([3.0, 1.0, 2.0, 0.5])

    def objective(logits, weight):
        log_p = exit_distribution(logits)
        return (jnp.sum(jnp.exp(log_p) * losses) + weight * jnp.sum(jnp.exp(log_p) * log_p)) / weight

    @jax.jit
    def descend(weight):
        step = jax.grad(objective)
        start = jnp.asarray([2.0, -1.0, 0.5, 0.0])
        return exit_distribution(jax.lax.fori_loop(0, 4000, lambda _, z: z - step(z, weight), start))

    np.testing.assert_allclose(jnp.exp(descend(1e5)), 0.25, atol=1e-4)
    # Where the weight isn't large, the optimum is p_t ~ exp(-CE_t / beta): the posterior under a uniform prior.
    np.testing.assert_allclose(jnp.exp(descend(1.0)), jax.nn.softmax(-losses), atol=1e-4)


def test_the_second_stage_wishes_to_go_on_where_it_helps():
    """By the formula with plain numbers; its gradient is lambda - (1 - w); the model gets none."""
    config = dataclasses.replace(TINY, stage=2, improvement_slope=3.0, improvement_threshold=0.2)
    params = drawn_params(config)
    (loss, _), gradients = passing(config)(params, BATCH)
    states, lambdas = plainly(TINY)
    losses = plain_losses(TINY, states)
    wish = 1 / (1 + np.exp(-3 * (np.maximum(0, losses[:-1] - losses[1:]) - 0.2)))
    wanted = -(wish * np.log(1 - lambdas[1:]) + (1 - wish) * np.log(lambdas[1:]))
    assert 0.2 < wish.min() < 0.4 < 0.6 < wish.max()
    np.testing.assert_allclose(loss, (wanted.sum(0) / 3 * MASK).sum(), rtol=1e-5)
    slope = (lambdas[1:] - (1 - wish)) * MASK / 3
    np.testing.assert_allclose(gradients["exit_gate"]["weight"], np.einsum("lbs,lbsh->h", slope, states[1:]), atol=1e-4)
    np.testing.assert_allclose(gradients["exit_gate"]["bias"], [slope.sum()], atol=1e-4)
    assert not any(np.any(leaf) for name, part in gradients.items() if name != "exit_gate" for leaf in flat(part))


def flat(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_defaults_of_the_second_stage():
    """k = 50 and gamma = 0.005: an improvement by a tenth of a nat is a clear wish to go on, none is a mild one."""
    losses, logits = jnp.asarray([[1.0, 1.0], [0.9, 1.0]]), jnp.asarray([[0.0, 0.0], [2.0, 2.0]])
    found = gate_losses(logits, losses, TINY.improvement_slope, TINY.improvement_threshold)
    for i, w in enumerate((1 / (1 + np.exp(-50 * 0.095)), 1 / (1 + np.exp(50 * 0.005)))):
        stop = 1 / (1 + np.exp(-2.0))
        np.testing.assert_allclose(found[0, i], -(w * np.log(1 - stop) + (1 - w) * np.log(stop)), rtol=1e-5)


def test_exit_by_the_sum_of_probabilities():
    """q = 0 stops after the first loop, q = 1 never, even where a gate is rounded to 1."""

    def finished(q, going_on):
        state = Looped(jnp.zeros((1, 1, 16)), jnp.full((1, 1), going_on))
        found = build(dataclasses.replace(TINY, exit_threshold=q)).finished({}, state, state, depth_of(0, 3))
        return None if found is None else bool(found[0, 0])

    assert finished(0.0, 1.0) is True
    assert finished(0.6, 0.45) is False and finished(0.6, 0.35) is True
    assert finished(1.0, 0.0) is None and not build(TINY).flags.halts
    assert build(dataclasses.replace(TINY, exit_threshold=0.9)).flags.halts


def test_analysis_sees_where_tokens_would_stop():
    """Averages of p_t over the tokens that aren't padding, and the head's loss after each loop."""
    real = np.arange(7) < np.array([[7], [4]])
    batch = BATCH | {"segment_ids": real.astype(np.int32), "answer_mask": MASK & real, "loss_mask": MASK & real}
    seen = jax.jit(functools.partial(observe_batch, TINY))(drawn_params(TINY), {}, batch)
    states, lambdas = plainly(TINY)
    np.testing.assert_allclose(seen["exit_probability"], (exit_shares(lambdas) * real).sum((1, 2)), rtol=1e-4)
    losses = plain_losses(TINY, states) * (MASK & real)
    np.testing.assert_allclose(seen["lens_loss"], losses.sum((1, 2)), rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exit_threshold": 1.5}, "1.5 is no probability"),
        ({"kv_heads": 3}, "3 does not divide"),
        ({"head_size": 7}, "7 is odd"),
        ({"depth": 0}, "too small"),
        ({"depth": 1, "stage": 2}, "model.depth 1 has no other"),
    ],
)
def test_settings_that_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **change)
