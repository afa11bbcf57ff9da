"""The optimizer against AdamW written out in NumPy."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dreamer_jax.blocks.parameters import Role
from dreamer_jax.config.sections import TrainingConfig
from dreamer_jax.families import build, initialise
from dreamer_jax.training.optimizer import learning_rate, make_optimizer
from tests.training.cases import tiny_config

CONFIG = TrainingConfig(
    learning_rate=0.03, warmup_steps=2, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2, clip_norm=2.0
)
SHAPES = {
    "layers": {"norm": {"scale": (3, 4)}, "expert": {"down": (3, 2, 4)}},
    "final": {"scale": (4,)},
    "head": (5, 4),
}
DECAYED = {"layers": {"norm": {"scale": False}, "expert": {"down": True}}, "final": {"scale": False}, "head": True}
ROLES = {
    "layers": {"norm": {"scale": "norm"}, "expert": {"down": "matrix"}},
    "final": {"scale": "norm"},
    "head": "embedding",
}


def draw(seed: int, size: float):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: size * rng.normal(size=shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def adamw(params, gradients):
    """Three lines of the paper's recipe in float64, for a list of gradients; yields the parameters after each."""
    m = v = jax.tree.map(np.zeros_like, params)
    for step, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g, n=norm: g * min(1, CONFIG.clip_norm / n), gradient)
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, gradient)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, gradient)
        rate = {1: 0.015, 2: 0.03, 3: 0.03}[step]

        def update(p, m, v, decayed, t=step, rate=rate):
            direction = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            return p - rate * (direction + (0.2 * p if decayed else 0))

        params = jax.tree.map(update, params, m, v, DECAYED)
        yield params


norm = optax.tree.norm


def test_three_steps():
    """The first gradient is clipped, the second is not, and the rate warms up for two steps."""
    start, gradients = draw(0, 1.0), [draw(1, 3.0), draw(2, 0.1), draw(3, 1.0)]
    optimizer = make_optimizer(CONFIG, ROLES)
    params = jax.tree.map(jnp.float32, start)
    state, update = optimizer.init(params), jax.jit(lambda g, s, p: optimizer.update(g, s, p, gradient_norm=norm(g)))
    for step, expected in enumerate(adamw(start, gradients), 1):
        updates, state = update(jax.tree.map(jnp.float32, gradients[step - 1]), state, params)
        params = optax.apply_updates(params, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), params, expected)


def adam_atan2(params, gradients):
    """The same recipe with the arctangent and clipped updates, written out in float64."""
    m = v = jax.tree.map(np.zeros_like, params)
    for step, gradient in enumerate(gradients, 1):
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, gradient)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, gradient)
        rate = {1: 0.015, 2: 0.03, 3: 0.03}[step]

        def update(p, g, m, v, decayed, t=step, rate=rate):
            first, second = m / (1 - 0.8**t), v / (1 - 0.9**t)
            larger = np.sqrt(np.mean(np.divide(g**2, second, out=np.zeros_like(g), where=second > 0)))
            return p - rate * (np.arctan2(first, np.sqrt(second)) / max(1, larger) + (0.2 * p if decayed else 0))

        params = jax.tree.map(update, params, gradient, m, v, DECAYED)
        yield params


def test_three_steps_of_the_arctangent():
    """A gradient that suddenly grows takes a smaller step; a row without gradient, and a scale of 1e-12, do no harm."""
    start, gradients = draw(0, 1.0), [draw(1, 1.0), draw(2, 30.0), draw(3, 1e-2)]
    for gradient in gradients:
        gradient["head"][0] = 0
        gradient["final"]["scale"] *= 1e-12
    config = dataclasses.replace(CONFIG, optimizer="adam_atan2", clip_norm=1e9)
    optimizer = make_optimizer(config, ROLES)
    params = jax.tree.map(jnp.float32, start)
    state, update = optimizer.init(params), jax.jit(lambda g, s, p: optimizer.update(g, s, p, gradient_norm=norm(g)))
    for step, expected in enumerate(adam_atan2(start, gradients), 1):
        updates, state = update(jax.tree.map(jnp.float32, gradients[step - 1]), state, params)
        params = optax.apply_updates(params, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), params, expected)


def test_what_is_not_trained_has_no_update_and_no_moments():
    optimizer = make_optimizer(dataclasses.replace(CONFIG, trainable="layers.expert,norm"), ROLES)
    params, gradient = (jax.tree.map(jnp.float32, draw(seed, 1.0)) for seed in (0, 1))
    state = optimizer.init(params)
    updates, _ = optimizer.update(gradient, state, params, gradient_norm=norm(gradient))
    moved = jax.tree.map(lambda update: bool(np.all(np.asarray(update) != 0)), updates)
    trained = {"layers": {"norm": {"scale": True}, "expert": {"down": True}}, "final": {"scale": True}, "head": False}
    assert moved == trained and not np.any(updates["head"])
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == 2 * (12 + 24 + 4)


def test_decay_spares_norm_scales_and_nothing_else():
    """Without a gradient only the decay moves a parameter; LA's scales are stacked into matrices, [L, h]."""
    for variant in ("LA", "DR+DA"):
        family = build(tiny_config(model__variant=variant).model)
        shapes = jax.eval_shape(lambda f=family: initialise(f, jax.random.key(0))[0])
        params, zeros = (jax.tree.map(lambda s, f=f: f(s.shape, np.float32), shapes) for f in (np.ones, np.zeros))
        optimizer = make_optimizer(CONFIG, family.roles)
        updates = jax.jit(lambda g, p, o=optimizer: o.update(g, o.init(p), p, gradient_norm=norm(g))[0])(zeros, params)
        moved = {jax.tree_util.keystr(path): float(u.min()) for path, u in jax.tree_util.tree_leaves_with_path(updates)}
        assert {name for name, by in moved.items() if by == 0} == {name for name in moved if "norm" in name}
        for name, by in moved.items():
            assert by == 0 or np.isclose(by, -0.015 * 0.2), name


@pytest.mark.parametrize("role", get_args(Role))
def test_decay_by_role(role):
    """Norm scales, biases, gates and what is injected are spared, whatever they are called; router keys are not."""
    params = {"scale": jnp.ones(2), "weight": jnp.ones(2)}
    optimizer = make_optimizer(CONFIG, {"scale": role, "weight": role})
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params, gradient_norm=jnp.ones(()))
    moves = 0 if role in ("norm", "bias", "gate", "injection") else -0.015 * 0.2
    jax.tree.map(lambda u: np.testing.assert_allclose(u, np.full(2, moves), rtol=1e-6), updates)


def test_warm_up():
    """Linear to the maximum at the last warm-up step, constant from there; no warm-up is allowed."""
    rates = [float(learning_rate(TrainingConfig(learning_rate=0.5, warmup_steps=4), step)) for step in range(1, 8)]
    np.testing.assert_allclose(rates, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5])
    assert float(learning_rate(TrainingConfig(learning_rate=0.5, warmup_steps=0), 1)) == 0.5
