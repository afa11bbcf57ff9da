"""The spectral radius of a step: known eigenvalues, and numpy's of the whole Jacobian of small models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.spectrum import ITERATIONS, radii, spectral_radius, window
from dreamer_jax.blocks.memory import Fresh, Memory
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.families import build, depth_of, forward
from dreamer_jax.families.contract import Family, Flags
from dreamer_jax.recurrence import Stepped, Weights
from dreamer_jax.studies.depths import usual_depths
from tests.families.cases import TINY_MODELS, drawn_params
from tests.families.puzzle_cases import puzzles

SIZE = 6
TURN = np.array([[np.cos(1.0), -np.sin(1.0)], [np.sin(1.0), np.cos(1.0)]])


def blocks(first: Any) -> np.ndarray:
    """[SIZE, SIZE]: a block of the largest eigenvalues, smaller ones behind it, seen along skew axes."""
    matrix = np.diag([0.0, 0.0, 0.5, -0.4, 0.3, 0.1])
    matrix[: len(first), : len(first)] = first
    axes = np.random.default_rng(0).normal(size=(SIZE, SIZE))
    return axes @ matrix @ np.linalg.inv(axes)


MATRICES = {
    "shrinks": (blocks([[0.8]]), 0.8),
    "grows": (blocks([[1.7]]), 1.7),
    "alternates": (blocks([[-1.2]]), 1.2),
    "two signs": (blocks([[1.1, 0], [0, -1.1]]), 1.1),
    "turns": (blocks(0.9 * TURN), 0.9),
    "nothing is left": (np.zeros((SIZE, SIZE)), 0.0),
    "nothing is left after some steps": (np.triu(np.ones((SIZE, SIZE)), 1), 0.0),
}


class Linear(Family):
    """x -> A x + e at every position; the next depth's matrix is twice as large."""

    flags = Flags(injects_inputs=True)
    depth = 4

    def init(self, key):
        """None are drawn."""
        return {}, {}

    def weights(self, params):
        """The matrix."""
        return Weights(shared=params["matrix"])

    def cast(self, params):
        """As they are."""
        return params

    def cast_weights(self, weights):
        """As they are."""
        return weights

    def enter(self, params, batch, memory, context):
        """Any numbers."""
        return jnp.sin(batch["tokens"][..., None] + jnp.arange(SIZE)), memory

    def start(self, entered, context, scale=1.0):
        """The state and a sum beside, which has an eigenvalue of 1 of its own."""
        return {"x": entered, "sum": 5 * entered, "steps": jnp.zeros((), jnp.int32)}

    def step(self, weights, state, inputs, depth, memory, context, tape=None):
        """One depth."""
        x = 2.0**depth.index * state["x"] @ weights.shared.T + inputs
        return Stepped({"x": x, "sum": state["sum"] + x, "steps": state["steps"] + 1}, memory)

    def stream(self, state):
        """x."""
        return state["x"]

    def fresh(self, batch, length, slots):
        """Nothing is kept."""
        return Memory(Fresh())

    def blocks(self):
        """None."""
        return []


def row_of(config: Any = None) -> dict[str, jax.Array]:
    """Two rows, the second with padding; of puzzles [2, 7]."""
    if config is not None and not build(config).flags.generates:
        return {name: jnp.asarray(values[:2]) for name, values in puzzles(config, rows=3).items()}
    real = np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)
    tokens = np.random.default_rng(3).integers(0, 23, real.shape).astype(np.int32)
    places = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    return {"tokens": jnp.asarray(tokens), "segment_ids": jnp.asarray(real), "positions": jnp.asarray(places)}


@pytest.mark.parametrize("name", MATRICES)
def test_a_linear_step_has_its_largest_eigenvalue(name):
    matrix, expected = MATRICES[name]
    assert np.abs(np.linalg.eigvals(matrix)).max() == pytest.approx(expected, abs=1e-6)
    family, params = Linear(HuginnConfig()), {"matrix": jnp.asarray(matrix, jnp.float32)}
    for at in (0, 2):
        found = radii(family, 4, params, {}, row_of(), np.int32(4), np.int32(at), jax.random.key(0))
        np.testing.assert_allclose(found, 2.0**at * expected, rtol=1e-3, atol=1e-12)


def test_rows_are_apart_and_padding_takes_no_part():
    """Where a row's own factor is the eigenvalue, and padding has a larger one."""
    factors = jnp.array([[0.5, 0.5, 9.0], [3.0, 3.0, 9.0], [9.0, 9.0, 9.0]])
    real = jnp.array([[True, True, False], [True, True, False], [False] * 3])
    start = jax.random.normal(jax.random.key(0), (3, 3, 2))
    found = spectral_radius(lambda v: factors[..., None] * v, start, real)
    np.testing.assert_allclose(found, [0.5, 3.0, 0.0], rtol=1e-5)


def test_the_window_leaves_out_the_first_products_and_weighs_the_others_alike_from_both_ends():
    weights = window(ITERATIONS)
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    used = weights[ITERATIONS // 4 :]
    assert (weights[: ITERATIONS // 4] == 0).all() and (used > 0).all()
    np.testing.assert_allclose(used, used[::-1], rtol=1e-3)


def whole_jacobians(family: Family, params: Any, model_state: Any, batch: Any, total: int, at: int) -> list[np.ndarray]:
    """Of the step at depth `at`, a row's real positions after one another, by autodiff one number after the other."""

    def whole(params, batch):
        passed = forward(family, params, model_state, batch, 1)
        entered, memory = family.enter(params, batch, family.fresh(*batch["tokens"].shape, total), passed.context)
        state, weights, inputs = family.start(entered, passed.context), family.weights(params), family.inputs(entered)

        def step(l, state, memory):
            return family.step(weights.at(l), state, inputs, depth_of(l, total), memory, passed.context)

        for l in range(at):
            state, memory, *_ = step(l, state, memory)
        leaves, tree = jax.tree.flatten(state)
        (place,) = [i for i, leaf in enumerate(leaves) if leaf is family.carried(state)]

        def after(x):
            changed = tree.unflatten([*leaves[:place], x, *leaves[place + 1 :]])
            return family.carried(family.resumed(weights.at(at), step(at, changed, memory).state))

        return jax.jacrev(after)(leaves[place])

    jacobian, found = np.asarray(jax.jit(whole)(params, batch), np.float64), []
    for row, real in enumerate(np.asarray(batch["segment_ids"]) > 0):
        its = jacobian[row][real][:, :, row][:, :, real]
        found.append(its.reshape(real.sum() * its.shape[1], -1))
    return found


@pytest.mark.slow_but("universal")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_it_is_that_of_the_whole_jacobian_for_every_family(name):
    """As close as power iteration comes where the largest eigenvalues are close to one another; with half of the
    products it can be 5 % off, if it starts with a vector that has little of the largest."""
    config = TINY_MODELS[name]
    family, params = build(config), jax.tree.map(jnp.asarray, drawn_params(config))
    model_state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), family.shapes[1])
    batch, total, at = row_of(config), usual_depths(family)[-1], 1
    measured = functools.partial(radii, family, total, params, model_state, batch, np.int32(total), np.int32(at))
    measure = functools.partial(measured, iterations=2 * ITERATIONS)
    found, whole = measure(jax.random.key(0)), whole_jacobians(family, params, model_state, batch, total, at)
    np.testing.assert_allclose(found, [np.abs(np.linalg.eigvals(its)).max() for its in whole], rtol=0.03)
    np.testing.assert_array_equal(found, measure(jax.random.key(0)))
