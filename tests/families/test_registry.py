"""What has to hold of every family of the registry: eight devices, bfloat16, and going on from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.budget.memory import caches
from dreamer_jax.config import models
from dreamer_jax.config.sections import CheckpointConfig, Config, MeshConfig
from dreamer_jax.config.values import experts_of
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, build, registry
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.training.state import abstract_state, create_state
from dreamer_jax.training.train_step import make_train_step
from tests.families.cases import TINY_MODELS, small_config
from tests.families.puzzle_cases import puzzles
from tests.training.cases import random_batch, tiny_config

META = {"data": "d", "tokenizer": "t"}


def test_every_family_is_tested():
    """Whoever registers a family gives its smallest model."""
    assert set(TINY_MODELS) == {family.key for family in models.at_hand()}


@pytest.mark.parametrize("family", TINY_MODELS)
def test_shapes_are_traced_once_for_all_models_of_one_size(family):
    """Which may share them only because operations and observation change no parameter."""
    config = TINY_MODELS[family]
    other = build(config, operations_of("pallas"), observe=True)
    assert other.shapes is build(config).shapes
    own = jax.eval_shape(other.init, jax.random.key(0))
    assert jax.tree.structure(own) == jax.tree.structure(other.shapes)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), own, other.shapes))
    wider = dataclasses.replace(config, vocab_size=config.vocab_size + 1)
    assert build(wider).shapes is not other.shapes


def test_a_class_that_is_not_whole_is_refused(monkeypatch):
    """By what it lacks, where it is built."""

    class Unfinished(Family):
        pass

    lacks = "Unfinished lacks .*enter, .*step, weights"
    for core, said in ((Unfinished, lacks), (object, "a class derived from dreamer_jax.families.Family"), (3, "CORE")):
        module = SimpleNamespace(import_module=lambda _, core=core: SimpleNamespace(CORE=core))
        monkeypatch.setattr(registry, "importlib", module)
        with pytest.raises(UserError, match=f"family huginn: .*{said}"):
            build(TINY_MODELS["huginn"])


KEPT = {
    **{name: config for name, config in TINY_MODELS.items() if build(config).flags.generates},
    **{f"huginn {cache}": dataclasses.replace(TINY_MODELS["huginn"], cache=cache) for cache in ("full", "compress-s2")},
    "ouro last": dataclasses.replace(TINY_MODELS["ouro"], cache="last"),
    **{variant: small_config(variant) for variant in ("DR+DA", "LA+DA")},
    "DR+DA of a window": small_config("DR+DA", da_window=2),
}


@pytest.mark.parametrize("name", KEPT)
def test_decoding_keeps_what_budgets_count(name):
    """Keys and values of one more position, and what is kept of the newest: allocated, and counted by blocks."""
    model = build(KEPT[name])

    def kept(positions: int) -> int:
        made = jax.eval_shape(lambda: (model.slots(1, positions, model.depth), model.flight(1, 1, model.depth)))
        return sum(leaf.size for leaf in jax.tree.leaves(made) if jnp.issubdtype(leaf.dtype, jnp.floating))

    counted = {positions: sum(caches(model, positions).values()) // 2 for positions in (32, 64)}  # two bytes each
    assert {positions: kept(positions) for positions in counted} == counted


def on_devices(family: str, devices: int, dtype: str = "float32") -> Config:
    model = dataclasses.replace(TINY_MODELS[family], dtype=dtype)
    mesh = MeshConfig(data=(2, 2), expert=2) if experts_of(model) else MeshConfig(data=(4, 2))
    return dataclasses.replace(tiny_config(), model=model, mesh=mesh if devices > 1 else MeshConfig())


@functools.cache
def program(family: str, devices: int, dtype: str) -> tuple[Config, Any, Any]:
    """(configuration, mesh, train step)."""
    config = on_devices(family, devices, dtype)
    mesh = make_mesh(config.mesh)
    return config, mesh, make_train_step(config, mesh)


@functools.cache
def initial(family: str) -> Any:
    """The fresh state of eight devices on the host; all begin with the same (tests/parallel/test_meshes.py)."""
    config, mesh, _ = program(family, 8, "float32")
    return jax.device_get(create_state(config, mesh))


def steps(family: str, devices: int, dtype: str = "float32", state: Any = None, saved: Any = None) -> Any:
    """Parameters, the model's own state and losses on the host after three steps.

    Args:
        state: of two steps, to go on with.
        saved: where to save the state of two steps.
    """
    config, mesh, step = program(family, devices, dtype)
    texts = build(config.model).flags.generates
    if state is None:
        shapes = abstract_state(config, mesh)
        state = jax.tree.map(lambda leaf, its: jax.device_put(leaf, its.sharding), initial(family), shapes)
    losses = []
    for seed in range(int(state.step), 3):
        batch = random_batch(seed) if texts else puzzles(config.model, seed, rows=8, length=12)
        state, metrics = step(state, jax.device_put(batch, NamedSharding(mesh, batch_spec(mesh))))
        losses.append(float(metrics["loss"]))
        if seed == 1 and saved is not None:
            saved.save(state)
            saved.close()
    return jax.device_get((state.params, state.model_state)), losses


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Every leaf to a share of its largest magnitude; keys' biases have no gradient but roundings."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))


# One code lays out the weights and states of all families: one stands for the others when there is no time for all.
@pytest.mark.slow_but("dreamer")
@pytest.mark.parametrize("family", TINY_MODELS)
def test_eight_devices_and_going_on(family, tmp_path):
    """Eight devices train as one does; who goes on from a checkpoint comes to the same."""
    checkpoints = functools.partial(Checkpoints, tmp_path, CheckpointConfig(), META)
    found, losses = steps(family, 8, saved=checkpoints())
    wanted, wanted_losses = steps(family, 1)
    assert_close(found, wanted, 5e-5)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    config, mesh, _ = program(family, 8, "float32")
    again, last = steps(family, 8, state=checkpoints().restore(abstract_state(config, mesh)))
    assert last == losses[2:]
    jax.tree.map(np.testing.assert_array_equal, again, found)


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_MODELS)
def test_bfloat16_on_eight_devices(family):
    """Losses of three steps are nearly those in float32."""
    _, rounded = steps(family, 8, "bfloat16")
    np.testing.assert_allclose(rounded, steps(family, 8)[1], rtol=0.05)
