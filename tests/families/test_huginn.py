"""Huginn against the outputs of its official code, and against a plain float64 version of its equations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dreamer_jax.blocks.memory import Context
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.export.huginn import names_of, params_of, to_tensor
from dreamer_jax.families import Drawn, build, depth_of, forward, initialise
from dreamer_jax.families.huginn import mean_depth, recurrences
from tests.outside import official_outputs

OFFICIAL = HuginnConfig(
    depth=8,
    hidden_size=64,
    heads=4,
    kv_heads=4,
    head_size=16,
    mlp_size=128,
    vocab_size=512,
    gradient_recurrences=4,
    dtype="float32",
)


@pytest.fixture(scope="module")
def golden():
    arrays, said = official_outputs("huginn_tiny")
    tensors = {name[2:]: arrays[name] for name in arrays.files if name.startswith("w/")}
    return arrays, said, params_of(tensors, OFFICIAL)


def run(config, params, tokens, depth, s0):
    family = build(config)

    @jax.jit
    def both(params, tokens, s0):
        passed = forward(family, params, {}, {"tokens": tokens}, depth, initial_state=s0)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return passed.inputs, passed.state, family.logits(params, hidden)

    return both(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(s0))


def test_official_forward(golden):
    arrays, _, params = golden
    states = arrays["fwd/raw_states_0_to_2"]
    for depth in (1, 2):
        inputs, state, logits = run(OFFICIAL, params, arrays["fwd/input_ids"], depth, arrays["fwd/s0"])
        np.testing.assert_allclose(inputs, arrays["fwd/prelude_out"], atol=1e-4)
        np.testing.assert_allclose(state, states[depth], atol=1e-4)
        np.testing.assert_allclose(logits, arrays[f"fwd/logits_r{depth}"], atol=1e-4)


@pytest.mark.parametrize(("key", "differentiated"), [("train", 2), ("train_full_bptt", 5)])
def test_official_gradients(golden, key, differentiated):
    """3 recurrences without and 2 with gradient, and 5 with: one loss, other gradients."""
    arrays, said, params = golden
    labels = arrays["train/labels"]
    config = dataclasses.replace(OFFICIAL, gradient_recurrences=differentiated)
    family = build(config)
    batch = {
        "tokens": jnp.asarray(arrays["fwd/input_ids"], jnp.int32),
        "targets": jnp.asarray(np.maximum(labels, 0), jnp.int32),
        "loss_mask": jnp.asarray(labels >= 0),
    }

    def loss(params):
        drawn = Drawn(jnp.int32(5), 5, differentiated)
        passed = forward(family, params, {}, batch, drawn, initial_state=jnp.asarray(arrays["fwd/s0"]))
        return family.loss(params, passed, batch)[0] / (labels >= 0).sum()

    found, gradients = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(found, said[key]["loss"], rtol=1e-5)
    tensors = to_tensors(gradients, config)
    assert set(tensors) == set(said[key]["grad_l2"])
    for name, norm in said[key]["grad_l2"].items():
        np.testing.assert_allclose(np.linalg.norm(tensors[name]), norm, rtol=1e-4, err_msg=name)
    if key == "train":
        whole = [name for name in arrays.files if name.startswith("train/grad.")]
        assert len(whole) == 3
        for name in whole:
            np.testing.assert_allclose(tensors[name.removeprefix("train/grad.")], arrays[name], atol=1e-5)


def to_tensors(tree, config):
    """A tree of parameters under the official names."""
    tensors = {}
    for name in names_of(config):
        leaf = tree
        for part in name.leaf.split("."):
            leaf = leaf[part]
        rows = to_tensor(name, np.asarray(leaf), config)
        tensors[name.tensor] = np.concatenate([tensors[name.tensor], rows]) if name.tensor in tensors else rows
    return tensors


TINY = HuginnConfig(
    depth=4,
    hidden_size=16,
    heads=4,
    kv_heads=2,
    head_size=8,
    mlp_size=24,
    vocab_size=32,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    queries="plain",
    dtype="float32",
)
FORMS = {
    "huginn": dataclasses.replace(TINY, queries="bias"),
    "llama": dataclasses.replace(
        TINY, form="pre_norm", coda_norm=False, tied_head=False, embedding_scale=1.0, state_std=0.0087
    ),
    "qwen": dataclasses.replace(TINY, form="pre_norm", queries="head_norm", coda_norm=False),
    "olmo": dataclasses.replace(TINY, form="branch_norm", queries="norm", coda_norm=False, tied_head=False),
}


def drawn_params(config, seed=0):
    """Parameters in which nothing is one or zero."""
    params, _ = initialise(build(config), jax.random.key(seed))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return structure.unflatten([x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


@pytest.mark.slow_but("huginn")
@pytest.mark.parametrize("form", FORMS)
def test_forward_is_that_of_the_equations(form):
    config, depth = FORMS[form], 3
    params = drawn_params(config)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 7))
    s0 = np.random.default_rng(1).normal(size=(2, 7, 16))
    _, _, logits = run(config, params, tokens, depth, s0.astype(np.float32))
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    np.testing.assert_allclose(logits, plain_forward(config, wide, tokens, depth, s0), atol=1e-4)


def plain_forward(config, params, tokens, depth, s0):
    """Geiping et al. (2025), section 3.1, one position and one head after the other, float64."""
    e = params["embedding"][tokens] * (config.embedding_scale or config.hidden_size**0.5)
    for layer in params["prelude"].values():
        e = plain_layer(config, layer, e)
    s = s0
    for _ in range(depth):
        s = np.concatenate([s, e], axis=-1) @ params["adapter"]
        for layer in params["core"].values():
            s = plain_layer(config, layer, s)
    x = plain_norm(config, s, params["final_norm"]) if config.coda_norm else s
    for layer in params["coda"].values():
        x = plain_layer(config, layer, x)
    return plain_norm(config, x, params["final_norm"]) @ params["embedding" if config.tied_head else "head"].T


def plain_norm(config, x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale


def plain_layer(config, layer, x):
    def norm(name, x):
        return plain_norm(config, x, layer[name]["scale"])

    def attention(x):
        return plain_attention(config, layer["attention"], x)

    def mlp(x):
        gate, up = (x @ layer["feed_forward"][name].T for name in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ layer["feed_forward"]["out"]

    for name, branch in (("attention", attention), ("mlp", mlp)):
        if config.form == "sandwich":
            x = norm(f"{name}_out_norm", x + branch(norm(f"{name}_norm", x)))
        elif config.form == "pre_norm":
            x = x + branch(norm(f"{name}_norm", x))
        else:
            x = x + norm(f"{name}_out_norm", branch(x))
    return x


def plain_attention(config, weights, x):
    n, kv, d = config.heads, config.kv_heads, config.head_size
    q, k, v = np.split(x @ weights["qkv"], [n * d, (n + kv) * d], axis=-1)
    if config.queries == "bias":
        q, k = q + weights["q_bias"], k + weights["k_bias"]
    elif config.queries == "norm":
        q, k = (plain_norm(config, y, weights[f"{name}_norm"]["scale"]) for name, y in (("q", q), ("k", k)))
    elif config.queries == "head_norm":
        by_head = ((name, y.reshape(*y.shape[:-1], -1, d), y.shape) for name, y in (("q", q), ("k", k)))
        q, k = (plain_norm(config, y, weights[f"{name}_norm"]["scale"]).reshape(shape) for name, y, shape in by_head)
    out = np.zeros_like(q)
    for b, i, head in np.ndindex(x.shape[0], x.shape[1], n):
        own = slice(head * d, head * d + d)
        shared = slice(head * kv // n * d, head * kv // n * d + d)
        query = turned(q[b, i, own], i, config.rope_base)
        scores = np.array([query @ turned(k[b, j, shared], j, config.rope_base) for j in range(i + 1)]) / np.sqrt(d)
        weights_ = np.exp(scores - scores.max())
        out[b, i, own] = weights_ / weights_.sum() @ v[b, : i + 1, shared]
    return out @ weights["out"]


def turned(x, position, base):
    """RoPE as complex numbers."""
    half = len(x) // 2
    angles = position * base ** (-np.arange(half) / half)
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag])


def test_recurrences_are_drawn_as_published():
    """1 + Poisson of a log-normal rate with mean 32: the statistics of 20,000 draws."""
    config = dataclasses.replace(TINY, depth=32)
    draws = np.asarray(recurrences(config, jax.random.key(3), (20_000,)))
    assert abs(draws.mean() - 33.0) < 0.5
    assert abs(draws.std() - 18.0) < 0.6
    assert abs(np.median(draws) - 29) <= 1
    assert draws.min() >= 1


def test_exponential_draws_have_their_mean_and_spread():
    config = dataclasses.replace(TINY, depth=32, depth_draw="exponential")
    draws = np.asarray(recurrences(config, jax.random.key(3), (20_000,)))
    assert abs(draws.mean() - 32.5) < 0.7  # 1 + the whole part of Exp(32)
    assert abs(draws.std() - 32.0) < 1.0
    assert draws.min() == 1


def test_a_step_draws_the_same_for_everybody():
    family = build(dataclasses.replace(TINY, gradient_recurrences=3))
    drawn = [int(family.draw(jax.random.key(7), jnp.int32(step), 4).depth) for step in (0, 1)]
    assert drawn[0] == drawn[1]  # the key alone decides; the train step folds the step into it
    others = {int(family.draw(jax.random.key(seed), jnp.int32(0), 4).depth) for seed in range(12)}
    assert len(others) > 3
    assert family.draw(jax.random.key(7), jnp.int32(0), 4).gradient_depths == 3


def test_a_curriculum_lets_the_mean_grow():
    """From 1 to the mean depth; with 1 - sqrt(1 - t) three quarters of the time for the first half."""
    grown = {"linear": [1, 4, 8, 12, 16, 16], "one_minus_sqrt": [1, 3, 5, 8, 16, 16]}  # steps 0, 16, 32, 48, 64, 99
    for shape, means in grown.items():
        config = dataclasses.replace(TINY, depth=16, depth_draw="fixed", curriculum=shape, curriculum_steps=64)
        family = build(config)
        steps = jnp.asarray([0, 16, 32, 48, 64, 99])
        drawn = [int(family.draw(jax.random.key(0), step, 4).depth) for step in steps]
        assert drawn == means
        assert mean_depth(dataclasses.replace(config, curriculum_steps=0), 0) == 16
    draws = np.asarray(recurrences(dataclasses.replace(TINY, depth=32), jax.random.key(3), (20_000,), jnp.int32(8)))
    assert abs(draws.mean() - 9) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("draw_by", ["step", "row"])
def test_a_curriculum_differentiates_no_more_than_its_mean(draw_by):
    """While the mean is 3, the last three recurrences of a deeper draw: the gradient of a model that is truncated
    there; at the end as many as are set."""
    config = dataclasses.replace(TINY, depth=8, gradient_recurrences=6, curriculum_steps=80, draw_by=draw_by)
    rng, rows = np.random.default_rng(8), jnp.arange(2)
    tokens, targets = (jnp.asarray(rng.integers(0, 32, (2, 7)), jnp.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets, "loss_mask": jnp.ones((2, 7), bool), "rows": rows}
    family = build(config)
    early, late = (family.draw(jax.random.key(0), jnp.int32(step), rows) for step in (21, 80))
    assert (early.gradient_depths, early.differentiated, late.gradient_depths, late.differentiated) == (6, 3, 6, 8)
    params, state = jax.jit(lambda key: nn.meta.unbox(family.init(key)))(jax.random.key(1))

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(last, differentiated):
        depth = jnp.asarray([9, 7] if draw_by == "row" else 9)

        def loss(params):
            drawn = early._replace(depth=depth, gradient_depths=last, differentiated=differentiated)
            return family.loss(params, forward(family, params, state, batch, drawn), batch)[0]

        return jax.tree.leaves(jax.grad(loss)(params))

    def apart(one, other):
        return max(float(jnp.abs(a - b).max()) for a, b in zip(one, other, strict=True))

    assert apart(gradients(6, early.differentiated), gradients(3, None)) == 0
    assert apart(gradients(6, late.differentiated), gradients(6, jnp.int32(6))) == 0
    assert min(apart(gradients(6, jnp.int32(k)), gradients(6, jnp.int32(k + 1))) for k in (2, 5)) > 1e-6


def test_initial_states():
    """A normal of standard deviation sqrt(2/5) cut off at three of them; from keys in training, positions otherwise."""
    family = build(dataclasses.replace(TINY, hidden_size=256))
    positions = jnp.broadcast_to(jnp.arange(64), (4, 64))
    context = Context(jnp.ones_like(positions), positions)
    entered = jnp.zeros((4, 64, 256))
    fixed = family.start(entered, context)
    assert abs(float(fixed.std()) - 0.624) < 0.005
    assert 1.7 < float(jnp.abs(fixed).max()) <= 3 * 0.4**0.5 + 1e-5
    np.testing.assert_array_equal(fixed[0], fixed[1])
    moved = family.start(entered[:, :10], Context(None, positions[:, 20:30]))
    np.testing.assert_array_equal(moved, fixed[:, 20:30])  # as decoding starts them
    random = family.start(entered, context._replace(keys=jax.random.split(jax.random.key(0), 4)))
    assert float(jnp.abs(random[0] - random[1]).max()) > 1
    assert float(jnp.abs(random[0, 0] - random[0, 1]).max()) > 0.5
    assert not np.any(family.start(entered, context, 0.0))
    np.testing.assert_allclose(family.start(entered, context, 0.5), fixed / 2, rtol=1e-6)


def test_initialisation_follows_takase():
    """Everything at sqrt(2/5h), what writes to the stream divided by sqrt(2 layers passed); cut off at 3 of them."""
    config = dataclasses.replace(TINY, hidden_size=128, mlp_size=256, queries="bias", kv_heads=4, head_size=32)
    params, _ = initialise(build(config), jax.random.key(0))
    std = (2 / (5 * 128)) ** 0.5
    small = std / (2 * (1 + 2 * 4 + 1)) ** 0.5
    layer = params["core"]["1"]
    gate, up = layer["feed_forward"]["gate"], layer["feed_forward"]["up"]
    expected = [(params["embedding"], std), (params["adapter"], std), (layer["attention"]["qkv"], std), (gate, std)]
    expected += [(up, small), (layer["feed_forward"]["out"], small), (layer["attention"]["out"], small)]
    for matrix, size in expected:
        assert abs(float(np.std(matrix)) / (0.9866 * size) - 1) < 0.03
        assert float(np.abs(matrix).max()) <= 3 * size + 1e-6
    assert not np.any(layer["attention"]["q_bias"])
    assert np.all(layer["mlp_out_norm"]["scale"] == 1)


@pytest.mark.slow  # the official gradients are truncated, too
def test_truncated_gradients_are_those_of_a_stop_gradient():
    """Of 5 recurrences the last 2: states before get none; prelude and embedding theirs, through those 2. Whatever is
    kept for the backward pass."""
    config = dataclasses.replace(FORMS["huginn"], gradient_recurrences=2, z_loss=1e-3)
    family, params = build(config), drawn_params(config)
    rng = np.random.default_rng(5)
    tokens, targets = (jnp.asarray(rng.integers(0, 32, (2, 7)), jnp.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets, "loss_mask": jnp.asarray(rng.random((2, 7)) < 0.7)}
    s0 = jnp.asarray(rng.normal(size=(2, 7, 16)), jnp.float32)

    def ours(params, remat):
        drawn = Drawn(jnp.int32(5), 16, 2)
        passed = forward(family, params, {}, batch, drawn, remat, initial_state=s0)
        return family.loss(params, passed, batch)[0]

    def unrolled(params):
        positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
        context = Context(jnp.ones_like(positions), positions)
        entered, memory = family.enter(params, batch, family.fresh(2, 7, 1), context)
        state = s0
        for l in range(5):
            state = jax.lax.stop_gradient(state) if l == 3 else state
            state = family.step(family.weights(params), state, entered, depth_of(l, 5), memory, context).state
        hidden, _ = family.readout(params, state, memory, context)
        logits = hidden @ params["embedding"].T
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        losses = normaliser - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0] + 1e-3 * normaliser**2
        return jnp.sum(losses * batch["loss_mask"])

    expected_loss, expected = jax.jit(jax.value_and_grad(unrolled))(params)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for remat in ("full", "attention", "none"):
        loss, found = jax.jit(jax.value_and_grad(ours), static_argnums=1)(params, remat)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * scale, rtol=1e-4), found, expected)


@pytest.mark.slow
def test_rows_with_recurrences_of_their_own():
    """Rows of 1, 2, 4 and 5 recurrences in two groups: each gets what it gets by itself, and so do the gradients."""
    config = dataclasses.replace(FORMS["huginn"], gradient_recurrences=2)
    family, params, depths = build(config), drawn_params(config), np.array([2, 5, 1, 4])
    rng = np.random.default_rng(6)
    tokens, targets = (jnp.asarray(rng.integers(0, 32, (4, 6)), jnp.int32) for _ in range(2))
    s0 = jnp.asarray(rng.normal(size=(4, 6, 16)), jnp.float32)
    segments = jnp.asarray(np.where(np.arange(6) < 4, 1, [[2]] * 4), jnp.int32)

    @functools.partial(jax.jit, static_argnames="groups")
    @functools.partial(jax.value_and_grad, has_aux=True)
    def of_rows(params, rows, depth, groups):
        batch = {"tokens": tokens[rows], "targets": targets[rows], "segment_ids": segments[rows]}
        batch["loss_mask"] = batch["targets"] % 3 > 0
        passed = forward(family, params, {}, batch, Drawn(depth, 16, 2, groups), initial_state=s0[rows])
        return family.loss(params, passed, batch)

    found = of_rows(params, jnp.arange(4), jnp.asarray(depths), groups=2)
    alone = [of_rows(params, jnp.arange(i, i + 1), jnp.int32(depth), groups=1) for i, depth in enumerate(depths)]
    expected = jax.tree.map(lambda *rows: sum(rows), *alone)
    np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-6)
    assert found[0][1] == expected[0][1]
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * scale, rtol=1e-4), found[1], expected[1])


@pytest.mark.slow
def test_draws_by_row_are_of_the_rows_numbers():
    family = build(dataclasses.replace(TINY, draw_by="row", row_groups=4))
    drawn = family.draw(jax.random.key(0), jnp.int32(0), jnp.arange(16))
    assert drawn.depth.shape == (16,) and drawn.groups == 4 and len(set(drawn.depth.tolist())) > 1
    part = family.draw(jax.random.key(0), jnp.int32(0), jnp.arange(6, 9))
    np.testing.assert_array_equal(part.depth, drawn.depth[6:9])
    assert part.groups == 3
