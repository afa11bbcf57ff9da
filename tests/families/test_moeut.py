"""MoEUT against the outputs of its official code and a plain float64 version of its equations; limits, decoding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.observation import observe_batch
from dreamer_jax.blocks.memory import Context, Fresh, Memory
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.sigma_moe import SigmaMoE, equal_rows
from dreamer_jax.budget import memory, program
from dreamer_jax.config.models.moeut import MoeutConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.export.moeut import names_of, params_of, sizes_of, turned
from dreamer_jax.families import build, depth_of, forward, initialise
from dreamer_jax.families.contract import Pass
from dreamer_jax.families.moeut import Moeut, regularisers
from dreamer_jax.inference import Engine, fold
from tests.families.cases import drawn_params, logits_in_flight
from tests.families.plain_moeut import PlainMoeut
from tests.families.plain_ouro import wide
from tests.outside import official_outputs

TINY = MoeutConfig(
    depth=2,
    layers=2,
    hidden_size=32,
    vocab_size=64,
    heads=2,
    head_size=16,
    attention_experts=3,
    num_experts=6,
    experts_per_token=3,
    expert_size=16,
    dtype="float32",
)
"""The sizes of the official outputs, so that one compiled program serves all."""
ONE_LAYER = dataclasses.replace(TINY, layers=1)
GATED = dataclasses.replace(ONE_LAYER, attention_experts=1)
RNG = np.random.default_rng(0)
TOKENS, TARGETS = (RNG.integers(0, 64, (2, 10)).astype(np.int32) for _ in range(2))
BATCH = {"tokens": TOKENS, "targets": TARGETS, "loss_mask": RNG.random((2, 10)) < 0.7}


@functools.cache
def passing(config):
    """params, batch, weights -> (loss, (logged, -H of experts and attention by row, logits)), and the gradient.

    The regularisers are added to the loss again, with these weights: in its own a mistake would hardly show."""
    family = build(config)

    def loss(params, batch, weights):
        passed = forward(family, params, {}, batch)
        value, logged = family.loss(params, passed, batch)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        found = regularisers(passed)
        again = jnp.stack(found) @ batch["loss_mask"].sum(1)
        return value + weights @ again, (logged, found, family.logits(params, hidden))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


NOTHING, MUCH = np.zeros(2, np.float32), np.array([2, 3], np.float32)
"""Weights of the regularisers, beside those of the loss."""


def cross_entropies(logits, targets):
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - picked


# The official code.


@pytest.fixture(scope="module")
def official():
    arrays, said = official_outputs("moeut_tiny")
    said = said["moe"]
    weights = {name[6:]: arrays[name] for name in arrays.files if name.startswith("moe/w/")}
    others = {name[4:]: arrays[name] for name in arrays.files if not name.startswith("moe/w/")}
    return weights, others, said


def test_official_layers(official):
    """The stream after every layer, what the halves of the first give, and its experts."""
    weights, arrays, _ = official
    family, params = Moeut(TINY), jax.tree.map(jnp.asarray, params_of(weights, TINY))
    places = jnp.broadcast_to(jnp.arange(10), (2, 10))
    context, kept = Context(jnp.ones_like(places), places), {}
    entered, _ = family.enter(params, {"tokens": arrays["tokens"][:, :10]}, Memory(Fresh()), context)
    np.testing.assert_array_equal(entered, arrays["embedding_out"])
    apply = jax.jit(
        lambda weights, x: family.layer.apply(
            {"params": weights}, x, depth_of(0, 1), Fresh(), context, capture_intermediates=True
        )
    )
    x = entered
    for i in range(4):
        (x, _, chosen), found = apply(params["layers"][str(i % 2)], x)
        np.testing.assert_allclose(x, arrays["residual_after_layer"][i], atol=1e-4)
        kept = kept or {**found["intermediates"], "experts": chosen["experts"].indices}
    np.testing.assert_allclose(kept["attention"]["__call__"][0].out, arrays["l0_attn_out"], atol=1e-4)
    np.testing.assert_allclose(kept["feed_forward"]["__call__"][0][0], arrays["l0_ffn_out"], atol=1e-4)
    np.testing.assert_array_equal(
        np.sort(kept["experts"].reshape(2, 10, 3), -1), np.sort(arrays["l0_ffn_sel_index"], -1)
    )


def test_official_logits_losses_and_gradients(official):
    weights, arrays, said = official
    assert sizes_of({name: its.shape for name, its in weights.items()}).items() <= dataclasses.asdict(TINY).items()
    tokens, targets = (arrays["tokens"][:, i : 10 + i].astype(np.int32) for i in (0, 1))
    batch = {"tokens": tokens, "targets": targets, "loss_mask": np.ones((2, 10), bool)}
    (loss, (_, (experts, attention), logits)), gradients = passing(TINY)(params_of(weights, TINY), batch, NOTHING)
    np.testing.assert_allclose(logits, arrays["logits"], atol=1e-4)
    np.testing.assert_allclose(cross_entropies(np.asarray(logits), targets).mean(), said["ce"], rtol=1e-5)
    added = 0.01 * experts.mean() + 0.001 * attention.mean()
    np.testing.assert_allclose(added, said["reg_loss"], rtol=1e-5)
    np.testing.assert_allclose(loss / 20, said["ce"] + said["reg_loss"], rtol=1e-5)
    c = (2 / 4) ** 0.5  # what the official code draws has the deviations that test_initialisation asks for
    for tensor, std in (("ffn.values", c * 96**-0.5), ("attention.o", c * 32**-0.5), ("ffn.keys", c * 32**-0.5)):
        assert said["official_init_mean_std"][f"transformer.layers.0.{tensor}"][1] == pytest.approx(std, rel=0.02)
    gradients = jax.tree.map(lambda leaf: np.asarray(leaf) / 20, gradients)
    for leaf, tensor in names_of(TINY):
        found = turned(leaf, functools.reduce(lambda tree, key: tree[key], leaf.split("."), gradients))
        np.testing.assert_allclose(np.linalg.norm(found), said["grad_l2"][tensor], rtol=1e-4, err_msg=tensor)
        if f"grad/{tensor}" in arrays:
            np.testing.assert_allclose(found, arrays[f"grad/{tensor}"], atol=1e-5, err_msg=tensor)


def test_initialisation():
    """Standard deviations of the notes on the official code, and rows of equal length."""
    config = dataclasses.replace(TINY, layers=1, depth=4, hidden_size=128, num_experts=32, vocab_size=256)
    params, _ = initialise(build(config), jax.random.key(0))
    layer, c = params["layers"]["0"], (2 / 4) ** 0.5
    wanted = {"q": c * 128**-0.5, "v": c * 128**-0.5, "sel_v": c * 128**-0.5, "o": c * 32**-0.5}
    for name, std in wanted.items():
        assert layer["attention"][name].std() == pytest.approx(std, rel=0.05), name
    wanted = {"keys": c * 128**-0.5, "values": c * (32 * 16) ** -0.5, "expert_sel": c * 128**-0.5}
    for name, std in wanted.items():
        assert layer["feed_forward"][name].std() == pytest.approx(std, rel=0.05), name
    lengths = np.linalg.norm(layer["feed_forward"]["expert_sel"], axis=1)
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-5)
    assert params["embedding"].std() == pytest.approx(128**-0.5, rel=0.05)
    for name in ("head", "head_bias"):
        assert np.abs(params[name]).max() <= 128**-0.5 and params[name].std() == pytest.approx(384**-0.5, rel=0.1)
    # Attention: unit rows, times the row's own deviation over that of all unit rows.
    drawn = 0.2 * np.asarray(jax.random.normal(jax.random.key(5), (6, 8)))
    unit = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    found = equal_rows(0.2, by_row=True)(jax.random.key(5), (6, 8), jnp.float32)
    wanted = unit * drawn.std(axis=1, keepdims=True, ddof=1) / unit.std(ddof=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


# The equations.


@functools.cache
def plainly(config):
    """The plain rows after they have been computed, and x [R, B, S, h]."""
    rows = [PlainMoeut(config, wide(drawn_params(config))) for _ in TOKENS]
    return rows, np.stack([row.row(tokens, config.depth) for row, tokens in zip(rows, TOKENS, strict=True)], axis=1)


@pytest.mark.parametrize("config", [TINY, GATED], ids=["experts", "gated"])
def test_forward_and_loss_are_those_of_the_equations(config):
    """Also the regularisers, over all tokens of a row and all repeats; each row counts by its targets."""
    (loss, (logged, found, logits)), _ = passing(config)(drawn_params(config), BATCH, NOTHING)
    rows, states = plainly(config)
    wanted = rows[0].logits(states[-1])
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    terms = np.array([row.regularisers() for row in rows])  # [B, 2]
    np.testing.assert_allclose(np.stack(found, axis=1), terms, rtol=1e-5, atol=1e-6)
    targets = BATCH["loss_mask"].sum(1)
    total = (cross_entropies(wanted, TARGETS) * BATCH["loss_mask"]).sum()
    np.testing.assert_allclose(logged["last_loss"], total, rtol=1e-5)
    total += (targets * (0.01 * terms[:, 0] + 0.001 * terms[:, 1])).sum()
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(logged["expert_entropy"], -(targets * terms[:, 0]).sum() / config.layers, rtol=1e-5)
    assert (terms[:, 1] == 0).all() == (config is GATED)


def test_gradients_are_those_of_the_unrolled_repeats():
    """By operations that autodiff differentiates, with the regularisers written out over all tokens and repeats."""
    family, places = Moeut(TINY, REFERENCE), jnp.broadcast_to(jnp.arange(10), (2, 10))
    context = Context(jnp.ones((2, 10), jnp.int32), places)

    def unrolled(params):
        def repeat(x, _):
            probabilities = {}
            for g, its in params["layers"].items():
                found: Any = family.layer.apply({"params": its}, x, depth_of(0, 1), Fresh(), context)
                x, _, chosen = found
                for name, each in chosen.items():
                    probabilities[g, name] = jax.nn.softmax(each.logits).reshape(2, 10, -1, each.logits.shape[-1])
            return x, probabilities  # of every token, [B, S, n, E]

        x, probabilities = jax.lax.scan(repeat, params["embedding"][TOKENS], length=TINY.depth)
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        hidden = normed * params["out_norm"]["scale"] + params["out_norm"]["bias"]
        logits = jax.nn.log_softmax(hidden @ params["head"].T + params["head_bias"])
        total = -jnp.sum(jnp.take_along_axis(logits, TARGETS[..., None], -1)[..., 0] * BATCH["loss_mask"])
        for (_, name), its in probabilities.items():
            p = its.mean((0, 2))  # [B, n, E]
            by_row = jnp.sum(p * jnp.log(p), -1).mean(-1) * BATCH["loss_mask"].sum(1)
            total += (2.01 if name == "experts" else 3.001) * by_row.sum()
        return total

    loss, wanted = jax.jit(jax.value_and_grad(unrolled))(drawn_params(TINY))
    (found, _), gradients = passing(TINY)(drawn_params(TINY), BATCH, MUCH)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    # With such weights float32 loses digits: next to float64 one side errs by 1e-5 of the scale, the other by 3e-5.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5 * scale, rtol=1e-5), gradients, wanted)


# Limits.


def test_even_routers_have_the_least_regulariser():
    """-log E for each router; padding says nothing, and a row of padding alone adds nothing, nor to the gradient."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0 if "sel" in path[-1].key else leaf, drawn_params(TINY)
    )
    _, (_, (experts, attention), _) = passing(TINY)(params, BATCH, NOTHING)[0]
    np.testing.assert_allclose(experts, -2 * np.log(6), rtol=1e-6)
    np.testing.assert_allclose(attention, -2 * 2 * np.log(3), rtol=1e-6)

    def reg(values, segments):
        sums = jnp.einsum("blte,bt->lbe", jax.nn.softmax(values), (segments > 0) * 1.0)
        passed = Pass((), {"0": {"experts": sums}}, (), (), Memory(None), Context(segments, segments), jnp.int32(3))
        return regularisers(passed)[0]

    values, segments = RNG.normal(size=(2, 3, 4, 5)), jnp.array([[1, 1, 2, 0], [0, 0, 0, 0]])
    mean = np.asarray(jax.nn.softmax(values[0, :, :3])).mean((0, 1))
    np.testing.assert_allclose(reg(values, segments), [(mean * np.log(mean)).sum(), 0], rtol=1e-5)
    assert np.isfinite(jax.grad(lambda values: reg(values, segments).sum())(values)).all()


def test_all_experts_alike_are_one_gated_network():
    """k = E and equal experts: relu(x K) V, times the sum of the sigmoids."""
    block = SigmaMoE(REFERENCE, 8, 6, 4, 4, *(nn.initializers.normal(0.5) for _ in range(3)), parent=None)
    x, z = RNG.normal(size=(2, 1, 5, 8)).astype(np.float32)
    params = nn.meta.unbox(block.init(jax.random.key(0), x, z)["params"])
    alike = {name: jnp.broadcast_to(params[name][:1], params[name].shape) for name in ("keys", "values")}
    out, _ = block.apply({"params": {**params, **alike}}, x, z)
    gates = jax.nn.sigmoid(z @ params["expert_sel"].T).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        out, gates * (jax.nn.relu(x @ params["keys"][0]) @ params["values"][0]), rtol=1e-4, atol=1e-5
    )


# Decoding, counting, analysis.


@functools.cache
def folded(config):
    """With the experts' matrices as they are laid out for decoding."""
    return fold(config, drawn_params(config), {})


def test_greedy_tokens_are_the_likeliest_of_the_whole_pass():
    """Through the caches. The official cache fails here: it rotates the queries of generated tokens at position 0."""
    model, params = folded(ONE_LAYER), wide(drawn_params(ONE_LAYER))
    prompts = [[1, 5, 6], [2, 7, 8, 9, 11]]
    for prompt, row in zip(prompts, Engine(model).generate(prompts, 5), strict=True):
        plain = PlainMoeut(ONE_LAYER, params)
        likeliest = plain.logits(plain.row(prompt + row.tokens, 2)[-1]).argmax(-1)
        assert row.tokens == likeliest[len(prompt) - 1 : -1].tolist()
    assert model.params["head"].shape == (64, 33)


def test_positions_at_different_depths():
    """Ten positions in flight, each one repeat behind the one before: the logits of the whole pass, to 1e-4."""
    model = folded(ONE_LAYER)
    places = jnp.broadcast_to(jnp.arange(10), (2, 10))
    found = logits_in_flight(model, jnp.asarray(TOKENS), places, model.empty_slots(2, 10))
    rows, states = plainly(ONE_LAYER)
    np.testing.assert_allclose(found, rows[0].logits(states[-1]), atol=1e-4)


@pytest.mark.parametrize("experts", [1, 3])
def test_both_counters_agree(experts):
    config = dataclasses.replace(TINY, depth=5, attention_experts=experts)
    found = program.count(config, 24)
    assert found == program.expected(config, 24)
    feed_forward = 6 * (2 * 32 * 16 + 32)
    attention = 2 * 32 * 32 + 2 * experts * 32 * 32 + (1 if experts == 1 else 2) * 2 * experts * 32
    assert found.parameters == 2 * 64 * 32 + 64 + 2 * (feed_forward + attention + 4 * 32) + 2 * 32
    assert memory.caches(build(config), 10) == {"attention cache": 5 * 2 * 10 * 2 * 2 * 16 * 2}


def test_analysis_sees_every_router():
    masks = {name: jnp.asarray(BATCH["loss_mask"]) for name in ("loss_mask", "answer_mask")}
    places = jnp.broadcast_to(jnp.arange(10), (2, 10))
    segments = jnp.asarray([[1] * 10, [1] * 8 + [0] * 2])
    batch = {"tokens": TOKENS, "targets": jnp.asarray(TARGETS), "segment_ids": segments, "positions": places, **masks}
    sums = jax.jit(lambda params: observe_batch(ONE_LAYER, params, {}, batch))(drawn_params(ONE_LAYER))
    assert set(sums["counts"]) == {"experts_0", "values_0", "outputs_0"}
    np.testing.assert_array_equal(sums["counts"]["experts_0"].sum(1), 18 * 3)
    np.testing.assert_array_equal(sums["counts"]["values_0"].reshape(2, 2, 3).sum(2), 18 * 2)
    np.testing.assert_array_equal(sums["scores"]["outputs_0"].sum(1), 18 * 2 * 2)
    assert (sums["entropy"]["values_0"] / 18 < np.log(3)).all() and (sums["entropy"]["values_0"] > 0).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_size": 6}, "6 is not divisible by 4"),
        ({"experts_per_token": 7}, "7 is more than model.num_experts 6"),
        ({"attention_experts_per_token": 4}, "4 is more than model.attention_experts 3"),
        ({"depth": 0}, "too small"),
    ],
)
def test_settings_that_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **change)
