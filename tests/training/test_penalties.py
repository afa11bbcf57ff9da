"""What is asked beside the loss: against whole matrices, NumPy and finite differences."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.parameters import is_box
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build, forward
from dreamer_jax.families.contract import Drawn
from dreamer_jax.parallel import make_mesh
from dreamer_jax.training import depths, penalties
from dreamer_jax.training.state import create_state
from dreamer_jax.training.train_step import make_train_step
from tests.families.cases import TINY_MODELS, drawn_params, random_weights, small_config
from tests.training.cases import random_batch, tiny_config

HOW = RecurrenceConfig(draw="uniform", jacobian=0.5)
CONFIG = small_config("DR+DA", depth=4, hidden_size=8, attention_experts=False)
"""Without attention MoEs: their gradient is not the function's, since Eq. 7 stops a part of it."""
BATCH = {name: jnp.asarray(its[1:3, :5]) for name, its in random_batch(2).items()}
"""Row 0 is two documents, row 1 has a place that is padding."""


def passed(config: Any, params: Any, state: Any, depth: int = 3) -> Any:
    return forward(build(config), params, state, BATCH, Drawn(jnp.int32(depth), 4), kept_states=2)


@pytest.mark.slow
def test_an_estimate_of_the_whole_matrix():
    """With the unit vectors in place of random ones, the estimates add up to |J|_F^2 / h, by columns; J from a pass of
    its own whose state before the last depth is moved."""
    family, (params, bias) = build(CONFIG), jax.tree.map(jnp.asarray, random_weights(CONFIG))
    its = passed(CONFIG, params, {"balancing": bias})
    real = np.asarray(BATCH["segment_ids"] > 0) if "segment_ids" in BATCH else None
    before = its.states[-2]

    def last_step(x):
        def observe(step):
            def observed(weights, state, inputs, depth, memory, context, tape=None):
                state = jnp.where(depth.index == 2, x, state)
                return step(weights, state, inputs, depth, memory, context, tape)

            return observed

        return forward(family, params, {"balancing": bias}, BATCH, 3, observe=observe).state

    after, units = jax.jit(last_step), 5e-4 * np.eye(before.size, dtype=np.float32).reshape(-1, *before.shape)
    whole = np.stack([np.asarray(after(before + u) - after(before - u), np.float64) / 1e-3 for u in units], axis=-1)
    whole = whole.reshape(*before.shape, *before.shape)  # [B, S, h, B, S, h]
    whole *= real[:, :, None, None, None, None]
    columns = (whole**2).sum(axis=(0, 1, 2, 5)) / 8
    estimate = jax.jit(lambda many: jax.lax.map(lambda keys: penalties.jacobian(family, params, its, keys), many))
    many = jax.random.split(jax.random.key(0), (3000, 2))
    found = np.asarray(estimate(many), np.float64)
    error = found.std(axis=0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(axis=0) - columns) < 4.5 * error + 1e-6)
    assert (columns[real] > 0.05).all() and (error[real] < 0.1 * columns[real]).all()
    alone = passed(CONFIG, params, {"balancing": bias}, depth=1)
    assert not penalties.jacobian(family, params, alone, many[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dreamer", "huginn", "universal"])
def test_its_gradient_against_finite_differences(name):
    """In a random direction of the weights, with the state before the last depth and the memory held."""
    config = CONFIG if name == "dreamer" else TINY_MODELS[name]
    family, params = build(config), jax.tree.map(jnp.asarray, drawn_params(config))
    state = jax.tree.map(lambda its: jnp.zeros(its.shape, its.dtype), family.shapes[1])
    its, keys = jax.jit(lambda params: passed(config, params, state))(params), jax.random.split(jax.random.key(1), 2)

    @jax.jit
    def size(params):
        return jnp.sum(penalties.jacobian(family, params, its, keys))

    leaves, tree = jax.tree.flatten(params)
    drawn = jax.random.split(jax.random.key(2), len(leaves))
    direction = tree.unflatten([jax.random.normal(k, x.shape) * jnp.std(x) for k, x in zip(drawn, leaves, strict=True)])
    gradient = jax.grad(size)(params)
    slope = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))

    def moved(by):
        return size(jax.tree.map(lambda x, d: x + by * d, params, direction))

    found = (8 * (moved(1e-3) - moved(-1e-3)) - (moved(2e-3) - moved(-2e-3))) / 12e-3
    np.testing.assert_allclose(slope, found, rtol=0.02)
    assert abs(slope) > 1e-3


@pytest.mark.slow
def test_the_last_step_of_a_model_that_attends_to_texts():
    """Is that of the same model with learned slots, which are what its maps make of the texts; and so is the gradient
    of the maps."""
    slots, texts = {"pa_slots": 3, "pa_head_size": 4}, np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
    config = dataclasses.replace(CONFIG, **slots, pa_source="texts", pa_embedding_size=6)
    latents = dataclasses.replace(CONFIG, **slots)
    params, bias = jax.tree.map(jnp.asarray, random_weights(config))
    keys = jax.random.split(jax.random.key(3), 2)

    def size(config, state, make):
        def of(params):
            its = params["layer"]["parameter_attention"]
            its = {**its, **{name: make(its[name]) for name in ("keys", "values")}}
            given = {**params, "layer": {**params["layer"], "parameter_attention": its}}
            held = jax.tree.map(jax.lax.stop_gradient, passed(config, given, state))
            return jnp.sum(penalties.jacobian(build(config), given, held, keys))

        return jax.jit(jax.value_and_grad(of))(params)

    found = size(config, {"balancing": bias, "knowledge": {"texts": texts}}, lambda matrix: matrix)
    wanted = size(latents, {"balancing": bias}, lambda matrix: (texts @ matrix)[None])
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for name in ("keys", "values"):
        its, same = (each[1]["layer"]["parameter_attention"][name] for each in (found, wanted))
        assert np.abs(same).max() > 0
        np.testing.assert_allclose(its, same, rtol=0, atol=1e-4 * np.abs(same).max())


def test_what_is_added_to_the_loss():
    """Of the targets, times the weight; nothing where it is 0."""
    family, (params, bias) = build(CONFIG), jax.tree.map(jnp.asarray, random_weights(CONFIG))
    its, keys = passed(CONFIG, params, {"balancing": bias}), jax.random.split(jax.random.key(3), 2)
    found, logged = depths.loss(HOW, family, params, its, BATCH, keys)
    size = jnp.sum(penalties.jacobian(family, params, its, keys) * BATCH["loss_mask"])
    np.testing.assert_allclose(logged["last_jacobian"], size, rtol=1e-6)
    np.testing.assert_allclose(found, logged["last_loss"] + 0.5 * size, rtol=1e-6)


@pytest.mark.slow
def test_in_a_train_step():
    """The same over microbatches as at once: each row has a vector of its own. Rows with depths of their own keep no
    states, so it is refused there."""

    def metrics(microbatches):
        config = tiny_config(
            model__depth=3,
            recurrence__draw="fixed",
            recurrence__jacobian=0.1,
            training__microbatches=microbatches,
        )
        mesh = make_mesh(config.mesh)
        return make_train_step(config, mesh)(create_state(config, mesh), random_batch(0))[1]

    once, twice = metrics(1), metrics(2)
    for name in ("loss", "last_jacobian", "gradient_norm"):
        np.testing.assert_allclose(once[name], twice[name], rtol=2e-5)
    assert once["last_jacobian"] > 0
    with pytest.raises(ConfigError, match=r"recurrence\.jacobian: rows"):
        depths.check(RecurrenceConfig(draw="uniform", by="row", jacobian=0.1), build(CONFIG))


LAYERS = small_config("LA", depth=4)


@pytest.mark.slow
def test_layers_that_are_alike():
    """The cosine of layers k apart, over all matrices; 1 for loops that are equal, and its gradient is right."""
    family, (params, _) = build(LAYERS), random_weights(LAYERS)
    wanted = []
    for path, box in jax.tree_util.tree_flatten_with_path(family.boxed, is_leaf=is_box)[0]:
        if box.role == "matrix" and path[0].key == "layers":
            rows = functools.reduce(lambda tree, key: tree[key.key], path, params).astype(np.float64).reshape(4, -1)
            unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            wanted.append(np.mean([unit[l] @ unit[l + 2] for l in (0, 1)]))
    assert len(wanted) == 5  # q k v and out of SA, the routers' queries, gate and up, down
    found = penalties.likeness(family, params, 2)
    np.testing.assert_allclose(found, np.mean(wanted), rtol=1e-5)
    looped = {**params, "layers": jax.tree.map(lambda leaf: np.concatenate([leaf[:2]] * 2), params["layers"])}
    assert float(penalties.likeness(family, looped, 2)) == pytest.approx(1, abs=1e-6)
    assert float(penalties.likeness(family, looped, 1)) < 0.5

    def moved(by):
        shifted = params["layers"]["expert_attention"]["down"] + by * params["layers"]["expert_attention"]["down"][::-1]
        expert_attention = {**params["layers"]["expert_attention"], "down": shifted}
        return penalties.likeness(
            family, {**params, "layers": {**params["layers"], "expert_attention": expert_attention}}, 2
        )

    slope = jax.grad(moved)(0.0)
    np.testing.assert_allclose(slope, (moved(0.01) - moved(-0.01)) / 0.02, rtol=1e-3)


@pytest.mark.slow
def test_training_makes_layers_alike():
    """The loss has it whatever the number of targets and of microbatches; and who has no such layers is told."""

    def run(weight, microbatches=1):
        config = tiny_config(
            model__variant="LA", training__looping=weight, training__microbatches=microbatches, model__depth=2
        )
        mesh = make_mesh(config.mesh)
        step, state, found = make_train_step(config, mesh), create_state(config, mesh), []
        for _ in range(4):
            state, metrics = step(state, random_batch(0))
            found.append({name: float(its) for name, its in metrics.items() if name != "counts"})
        return found

    plain, asked = run(0.0), run(2.0)
    assert asked[0]["loss"] == pytest.approx(plain[0]["loss"] + 2 * (1 - asked[0]["likeness"]), rel=1e-5)
    assert asked[0]["last_loss"] == pytest.approx(plain[0]["loss"], rel=1e-5)
    assert asked[-1]["likeness"] > asked[0]["likeness"] + 0.05
    assert run(2.0, 2)[0]["loss"] == pytest.approx(asked[0]["loss"], rel=1e-5)
    for changes, line in (
        ({"model__variant": "DR"}, "training.looping: this model has no layers of their own"),
        ({"model__variant": "LA", "training__looping_layers": 2}, "training.looping_layers: 2 layers don't make 2"),
        ({"model__variant": "LA", "mesh__expert": 2}, "training.looping: devices that divide the experts"),
    ):
        config = tiny_config(**{"training__looping": 1.0, **changes})
        with pytest.raises(ConfigError, match=re.escape(line)):
            penalties.check_likeness(config, build(config.model))


def test_its_gradient_is_that_of_the_last_step_alone():
    """States, inputs and memories are as they are: nothing asks the weights to lead elsewhere."""
    config = dataclasses.replace(CONFIG, injection="diagonal")
    family, (params, bias) = build(config), jax.tree.map(jnp.asarray, random_weights(config))
    keys = jax.random.split(jax.random.key(4), 2)

    def size(params, held):
        its = passed(config, params, {"balancing": bias})
        its = jax.tree.map(jax.lax.stop_gradient, its) if held else its
        return jnp.sum(penalties.jacobian(family, params, its, keys))

    found, wanted = (jax.jit(jax.grad(size), static_argnums=1)(params, held) for held in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
