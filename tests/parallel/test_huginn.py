"""Huginn's step on eight devices: random states, drawn depths and divided neurons are those of one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.sections import Config, MeshConfig
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.training.state import create_state
from dreamer_jax.training.train_step import make_train_step
from tests.training.cases import random_batch, tiny_config

MODEL = HuginnConfig(
    depth=3,
    hidden_size=16,
    heads=2,
    kv_heads=2,
    head_size=8,
    mlp_size=22,
    vocab_size=23,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    gradient_recurrences=2,
    dtype="float32",
)
MESHES = {
    "mixed": MeshConfig(data=(2, 2), expert=2),
    "expert": MeshConfig(expert=4, data=(2,)),
    "slices": MeshConfig(slices=2, data=(2,), expert=2),
}


def config_on(mesh: MeshConfig, **changes: Any) -> Config:
    """22 neurons, which four devices can't divide evenly."""
    model = {name[7:]: value for name, value in changes.items() if name.startswith("model__")}
    others = {name: value for name, value in changes.items() if not name.startswith("model__")}
    config = tiny_config(**others)
    return dataclasses.replace(config, model=dataclasses.replace(MODEL, **model), mesh=mesh)


@functools.cache
def three_steps(mesh_config: MeshConfig, **changes: Any) -> Any:
    """Parameters and metrics on the host, after three steps that draw different depths."""
    config = config_on(mesh_config, **changes)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.size])
    step, state = make_train_step(config, mesh), create_state(config, mesh)
    metrics = []
    for seed in (1, 2, 3):
        batch = jax.device_put(random_batch(seed), NamedSharding(mesh, batch_spec(mesh)))
        state, its = step(state, batch)
        metrics.append({name: float(its[name]) for name in ("loss", "gradient_norm", "recurrences")})
    return jax.device_get(state.params), metrics


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Every leaf to a share of its largest magnitude, metrics likewise."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.slow  # a row of tests/families/test_registry.py has three steps on a mesh, too
@pytest.mark.parametrize("mesh", ["expert", "mixed", "slices"])
def test_three_steps_give_the_same_weights(mesh):
    found, wanted = three_steps(MESHES[mesh]), three_steps(MeshConfig())
    assert len({metrics["recurrences"] for metrics in wanted[1]}) > 1
    assert_close(found, wanted, 2e-5)


@pytest.mark.slow  # Dreamer's are those of every run of the tests
def test_microbatches_change_nothing():
    """A row draws its state from its number in the global batch; gradients may be divided after each microbatch."""
    found = three_steps(MeshConfig(data=(2,), expert=2), training__microbatches=2, training__scatter="microbatch")
    assert_close(found, three_steps(MeshConfig()), 2e-5)


@pytest.mark.slow  # a row of tests/families/test_registry.py has it too
def test_bfloat16_on_eight_devices():
    """Close to float32 on one, and learning."""
    _, metrics = three_steps(MESHES["mixed"], model__dtype="bfloat16")
    _, wanted = three_steps(MeshConfig())
    for its, other in zip(metrics, wanted, strict=True):
        assert its["loss"] == pytest.approx(other["loss"], rel=0.02)
        assert its["recurrences"] == other["recurrences"]
