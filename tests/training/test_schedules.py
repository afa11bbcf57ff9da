"""Schedules of the learning rate, and training of named parts of the model."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dreamer_jax.config.sections import TrainingConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.training.optimizer import learning_rate, trained_leaves
from dreamer_jax.training.state import abstract_state, create_state
from dreamer_jax.training.train_step import make_train_step
from tests.training.cases import random_batch, tiny_config


def rates(**settings) -> np.ndarray:
    """Those of the updates 1, 2, ..., steps."""
    config = TrainingConfig(steps=12, learning_rate=0.5, warmup_steps=2, **settings)
    return np.array([float(learning_rate(config, step)) for step in range(1, 13)])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_run_that_is_shorter_than_its_warm_up_only_warms_up(schedule):
    """To try a configuration with a few steps takes no other setting."""
    config = TrainingConfig(steps=3, warmup_steps=8, learning_rate=0.8, schedule=schedule)
    np.testing.assert_allclose([learning_rate(config, step) for step in (1, 2, 3)], [0.1, 0.2, 0.3], rtol=1e-6)


def test_cosine_falls_along_half_a_wave_to_the_floor():
    for floor in (0.0, 0.1):
        wave = [(1 + np.cos(np.pi * (step - 2) / 10)) / 2 for step in range(2, 13)]
        expected = [0.25] + [0.5 * (floor + (1 - floor) * share) for share in wave]
        np.testing.assert_allclose(rates(schedule="cosine", learning_rate_floor=floor), expected, rtol=1e-5, atol=1e-8)


def test_trapezoid_stays_and_falls_in_a_line():
    expected = [0.25, *[0.5] * 7, *(0.5 * (1 - 0.8 * n / 4) for n in range(1, 5))]
    found = rates(schedule="trapezoid", cooldown_steps=4, learning_rate_floor=0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(rates(schedule="trapezoid"), rates(schedule="constant"), err_msg="without a descent")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": "cosine", "cooldown_steps": 3}, "only training.schedule trapezoid"),
        ({"schedule": "trapezoid", "cooldown_steps": 11}, "more than training.steps 12"),
        ({"schedule": "cosine", "learning_rate_floor": 1.5}, "at most 1"),
        ({"schedule": "constant", "learning_rate_floor": 0.3}, "never falls"),
    ],
)
def test_schedules_that_can_not_be(settings, said):
    with pytest.raises(ConfigError, match=said):
        rates(**settings)


def named(tree) -> dict:
    """Path, with dots -> leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(key.key for key in path): leaf for path, leaf in leaves}


@pytest.mark.slow
def test_what_is_not_trained_keeps_its_bits(tmp_path):
    """On 8 devices: the rest has no gradient in the norm, no moments and no update, and the state is saved as it is."""
    config = tiny_config(training__trainable="layer.expert_attention,norm", mesh__data=(8,), training__warmup_steps=0)
    family, mesh = build(config.model), make_mesh(config.mesh)
    trained = named(trained_leaves(config.training, family.roles))
    assert 0 < sum(trained.values()) < len(trained)
    state = create_state(config, mesh)
    before = named(jax.device_get(state.params))
    state, metrics = make_train_step(config, mesh)(state, random_batch(1))
    after = named(jax.device_get(state.params))
    for name, moves in trained.items():
        assert np.array_equal(before[name], after[name]) != moves, name
    sizes = sum(leaf.size for name, leaf in after.items() if trained[name])
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim) == 2 * sizes, "two moments each"

    whole = tiny_config(mesh__data=(8,), training__warmup_steps=0)
    _, all_metrics = make_train_step(whole, mesh)(create_state(whole, mesh), random_batch(1))
    assert 0 < metrics["gradient_norm"] < all_metrics["gradient_norm"]
    assert metrics["loss"] == all_metrics["loss"]

    meta = {"data": "d", "tokenizer": "t"}
    checkpoints = Checkpoints(tmp_path, config.checkpoint, meta)
    checkpoints.save(state)
    checkpoints.settle(wait=True)
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(abstract_state(config, mesh)), state)
    checkpoints.close()


@pytest.mark.slow_but("router_key")
@pytest.mark.parametrize(("trainable", "moves"), [("head,norm", False), ("router_key", True)])
def test_biases_that_balance_rest_with_their_routers(trainable, moves):
    """A frozen layer goes on choosing the same experts."""
    config = tiny_config(training__trainable=trainable, training__warmup_steps=0)
    mesh = make_mesh(config.mesh)
    state = create_state(config, mesh)
    before = jax.device_get(state.model_state)
    state, _ = make_train_step(config, mesh)(state, random_batch(1))
    alike = jax.tree.map(np.array_equal, before, jax.device_get(state.model_state))
    assert jax.tree.leaves(alike) and all(jax.tree.leaves(alike)) != moves


@pytest.mark.parametrize("variant", ["LA", "DR+DA"])
def test_names_are_roles_or_parts(variant):
    family = build(tiny_config(model__variant=variant).model)
    roles = named(family.roles)

    def chosen(trainable: str) -> set[str]:
        flags = named(trained_leaves(TrainingConfig(trainable=trainable), family.roles))
        return {name for name, flag in flags.items() if flag}

    assert chosen("") == set(roles)
    assert chosen("norm") == {name for name, role in roles.items() if role == "norm"}
    assert chosen("head, norm") == chosen("norm") | {"head"}
    parts = {name.partition(".")[0] for name in roles}
    assert set().union(*(chosen(part) for part in parts)) == set(roles)
    with pytest.raises(ConfigError, match=r"'hea' is neither a role \(.*norm.*\) nor a part"):
        chosen("hea")
