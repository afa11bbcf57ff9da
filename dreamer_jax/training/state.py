"""The state of a run: fresh, as shapes, and how it is divided over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dreamer_jax.config.sections import Config
from dreamer_jax.model import initialise
from dreamer_jax.parallel.layout import parameter_layouts
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training.optimizer import make_optimizer


def create_state(config: Config, mesh: Mesh) -> TrainState:
    """A fresh state from `run.seed`, divided over the devices; its numbers don't depend on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    # Drawing every matrix takes the CPU backend seconds to compile at full effort; this little gives the same bits.
    quick = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if quick else None
    return jax.jit(lambda: _fresh(config), out_shardings=shardings, compiler_options=options)()


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """The same tree as `create_state`, of shapes, dtypes and `NamedSharding`s only: nothing is allocated.

    Leaves have the model's shapes. Parameters and their moments are divided over all devices of a slice, by
    `parallel.layout`; the rest is the same everywhere.
    """
    state = jax.eval_shape(lambda: _fresh(config))

    def place(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state, state_specs(config, mesh))


def state_specs(config: Config, mesh: Mesh) -> TrainState:
    """The tree of PartitionSpecs of the state."""
    layouts = parameter_layouts(config.model, mesh)
    specs = jax.tree.map(lambda layout: layout.spec, layouts)
    state = jax.eval_shape(lambda: _fresh(config))
    recipe = make_optimizer(config.training)
    optimizer = optax.tree_utils.tree_map_params(
        recipe, lambda _, spec: spec, state.optimizer, specs, transform_non_params=lambda _: P()
    )
    everywhere: Any = P()
    return TrainState(everywhere, specs, optimizer, jax.tree.map(lambda _: P(), state.balancing))


def _fresh(config: Config) -> TrainState:
    params, balancing = initialise(config.model, jax.random.key(config.run.seed))
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config.training).init(params), balancing)
