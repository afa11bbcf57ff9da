"""Thinking steps, dropout and puzzles on eight devices are those of one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dreamer_jax.config.sections import Config, MeshConfig
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.planning.worker import abstract_batch
from dreamer_jax.training.state import abstract_state, create_state
from dreamer_jax.training.train_step import make_evaluation_step, make_train_step
from tests.families.puzzle_cases import form, puzzles
from tests.training.cases import tiny_config

EIGHT = MeshConfig(data=(4, 2))


def config_on(mesh: MeshConfig, microbatches: int = 1, dtype: str = "float32") -> Config:
    model = form("graph", dropout=0.2, dtype=dtype)
    config = tiny_config(training__microbatches=microbatches, data__sequence_length=7)
    return dataclasses.replace(config, model=model, mesh=mesh)


@functools.cache
def three_steps(mesh_config: MeshConfig, microbatches: int = 1, dtype: str = "float32") -> Any:
    """Parameters, metrics and an evaluation on the host, after three steps that draw different depths."""
    config = config_on(mesh_config, microbatches, dtype)
    mesh = make_mesh(mesh_config)
    step, state = make_train_step(config, mesh), create_state(config, mesh)
    metrics = []
    for seed in (1, 2, 3):
        batch = jax.device_put(puzzles(config.model, seed, rows=8), NamedSharding(mesh, batch_spec(mesh)))
        state, its = step(state, batch)
        metrics.append({name: float(its[name]) for name in ("loss", "gradient_norm", "thinking_steps", "accuracy")})
    evaluated = make_evaluation_step(config, mesh)(state.params, state.model_state, batch)
    return jax.device_get((state.params, metrics, evaluated))


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Every leaf to a share of its largest magnitude."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))


@pytest.mark.slow  # tests/families/test_registry.py has eight devices for each family
def test_three_steps_give_the_same_weights():
    found, wanted = three_steps(EIGHT), three_steps(MeshConfig())
    assert len({metrics["thinking_steps"] for metrics in wanted[1]}) > 1
    sums = {name: np.sum(rows) for name, rows in wanted[2].items()}
    assert sums["answers"] == sums["targets"] == 7 and 0 < sums["exact"] <= 7
    assert_close(found, wanted, 2e-5)


@pytest.mark.slow  # Dreamer's are those of every run of the tests
def test_microbatches_change_nothing():
    """A row draws what it drops from its number in the global batch."""
    assert_close(three_steps(MeshConfig(), microbatches=2), three_steps(MeshConfig()), 2e-5)


def test_a_plan_knows_what_a_batch_of_puzzles_holds():
    """The step is lowered from shapes alone."""
    config = config_on(EIGHT)
    mesh = make_mesh(EIGHT)
    batch = abstract_batch(config, mesh)
    assert batch["read"].shape == (8, 2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        make_train_step(config, mesh).lower(abstract_state(config, mesh), batch)


@pytest.mark.slow  # a row of tests/families/test_registry.py has it too
def test_bfloat16_on_eight_devices():
    """Close to float32 on one."""
    _, metrics, _ = three_steps(EIGHT, dtype="bfloat16")
    _, wanted, _ = three_steps(MeshConfig())
    for its, other in zip(metrics, wanted, strict=True):
        assert its["loss"] == pytest.approx(other["loss"], rel=0.05)
        assert its["thinking_steps"] == other["thinking_steps"]
