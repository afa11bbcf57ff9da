"""What is seen within a pass: norms and changes of states, which depths answers need, and when a model halts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.passes import answers, counted, depths_needed, look, summarise_pass
from dreamer_jax.families import build, forward
from dreamer_jax.studies.depths import usual_depths
from tests.families.cases import TINY_MODELS, drawn_params, small_config
from tests.families.puzzle_cases import puzzles
from tests.training.cases import random_batch


def case(config: Any) -> tuple[Any, Any, Any, Any]:
    """The family, drawn parameters, its state, and a batch with padding."""
    family = build(config)
    model_state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), family.shapes[1])
    batch = random_batch(0) if family.flags.generates else puzzles(config)
    return family, drawn_params(config), model_state, batch


def test_depths_needed_by_their_definition():
    tokens = np.random.default_rng(0).integers(0, 2, (5, 60))
    for needed, column in zip(depths_needed(tokens), tokens.T, strict=True):
        stays = [all(later == column[-1] for later in column[depth - 1 :]) for depth in range(1, 6)]
        assert needed == 1 + stays.index(True)
    assert (depths_needed(np.ones((4, 3))) == 1).all()  # nothing ever changes
    assert (depths_needed(np.arange(4)[:, None]) == 4).all()  # the last depth still changes it
    assert (depths_needed(np.ones((1, 2))) == 1).all()


def test_norms_and_changes_are_those_of_the_states():
    """Against states that a pass of another program leaves, in numpy; of Dreamer, whose code knows the depth."""
    family, params, model_state, batch = case(small_config())

    def observe(step):
        def observed(weights, state, *rest):
            return step(weights, state, *rest)._replace(counts=state)

        return observed

    @jax.jit
    def states(params, model_state, batch):
        passed = forward(family, params, model_state, batch, 2, observe=observe)
        return jnp.concatenate([passed.counts, passed.state[None]])

    x = np.asarray(states(params, model_state, batch), np.float64)
    seen = look(family, 5, params, model_state, batch, np.int32(2))
    np.testing.assert_allclose(seen.norm[:2], np.linalg.norm(x[1:], axis=-1), rtol=1e-5)
    expected = np.linalg.norm(x[1:] - x[:-1], axis=-1) / np.linalg.norm(x[:-1], axis=-1)
    np.testing.assert_allclose(seen.residual[:2], expected, rtol=1e-4)
    assert (np.asarray(seen.norm[2:]) == 0).all()  # no such depths
    summary, real = summarise_pass(family, batch, seen, 2), batch["segment_ids"] > 0
    np.testing.assert_allclose(summary["norm"], np.linalg.norm(x[1:], axis=-1)[:, real].mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(summary["residual"], expected[:, real].mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(summary["residual_tail"], np.quantile(expected[:, real], 0.9, axis=1), rtol=1e-4)


@pytest.mark.slow_but("universal", "depth_recurrent")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_pass_of_every_family(name):
    """Read out after its last depth it answers as the model does, of a depth that is compiled in; counts are whole."""
    config = TINY_MODELS[name]
    if name == "algoformer":
        config = dataclasses.replace(config, inject="add")  # then its first state is 0, as a PonderLM's is
    family, params, model_state, batch = case(config)
    depth, deepest = family.depth, usual_depths(family)[-1]
    seen = look(family, deepest, params, model_state, batch, np.int32(depth))
    mask, given = counted(family, batch), answers(family, deepest, params, model_state, batch, np.int32(depth))

    @jax.jit
    def evaluated(params, model_state, batch):
        return family.evaluate(params, forward(family, params, model_state, batch, depth), batch)[1]

    right = np.asarray(evaluated(params, model_state, batch))[batch["loss_mask"]]
    targets = batch["targets"][batch["loss_mask"]]
    np.testing.assert_array_equal(np.asarray(given)[mask] == targets, right)
    np.testing.assert_array_equal(np.asarray(seen.likeliest)[depth - 1], given)
    summary = summarise_pass(family, batch, seen, depth)
    assert len(summary["norm"]) == len(summary["residual"]) == len(summary["needed"]) == depth
    assert sum(summary["needed"]) == mask.sum()
    assert ("halted" in summary) == family.flags.halts
    if family.flags.halts:
        assert len(summary["halted"]) == depth + 1 and sum(summary["halted"]) == batch["loss_mask"].sum()
    assert (summary["residual"][0] is None) == (name in ("algoformer", "ponder"))
