"""The state of a run: fresh, as shapes, and how it is divided over devices."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dreamer_jax.config.sections import Config
from dreamer_jax.config.values import knowledge_of
from dreamer_jax.errors import UserError
from dreamer_jax.families import KNOWLEDGE, Family, build, initialise
from dreamer_jax.parallel.layout import parameter_layouts
from dreamer_jax.runs.array_files import read_tree
from dreamer_jax.runs.knowledge import read_embeddings
from dreamer_jax.runs.models import Located, locate_run
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training.optimizer import make_optimizer


def create_state(config: Config, mesh: Mesh) -> TrainState:
    """A fresh state, divided over the devices; its numbers don't depend on the mesh.

    It is drawn from `run.seed`, or its weights are those of the run that `training.initial_weights` names. Embeddings
    of texts are those of the file that `data.knowledge` names.

    Raises:
        UserError: there is no such run, or it holds another model; or no such file, or it holds something else.
    """
    texts = _texts(config)  # what is wrong with them shows before anything is compiled
    state = draw_state(config, mesh)
    if config.training.initial_weights:
        state = _with_weights_of(config.training.initial_weights, state)
    if texts is None:
        return state
    sharding = state.model_state[KNOWLEDGE]["texts"].sharding
    placed = jax.make_array_from_callback(texts.shape, sharding, lambda index: texts[index])
    return state.replace(model_state={**state.model_state, KNOWLEDGE: {"texts": placed}})


def draw_state(config: Config, mesh: Mesh) -> TrainState:
    """The same drawn from `run.seed` alone, whatever else a new run begins from; its embeddings of texts are none."""
    family = build(config.model)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, _abstract(config, family, mesh))

    def fresh() -> TrainState:
        params, model_state = initialise(family, jax.random.key(config.run.seed))
        optimizer = make_optimizer(config.training, family.roles)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), model_state)

    # Drawing every matrix takes the CPU backend seconds to compile at full effort; this little gives the same bits.
    quick = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if quick else None
    return jax.jit(fresh, out_shardings=shardings, compiler_options=options)()


def check_beginning(config: Config) -> None:
    """Look for what a new run begins from, before anything is made: a directory with settings that can't be trained
    would refuse those that can.

    Raises:
        UserError: it isn't there, or doesn't fit.
    """
    _texts(config)
    if config.training.initial_weights:
        _require_same_model(_located(config.training.initial_weights), config)


def _texts(config: Config) -> np.ndarray | None:
    if knowledge_of(config.model) is None:
        return None
    try:
        return read_embeddings(config.data.knowledge, config.model)
    except UserError as error:
        raise UserError(f"data.knowledge: {error}") from None


def _located(run: str) -> Located:
    try:
        return locate_run(run)
    except UserError as error:
        raise UserError(f"training.initial_weights: {error}") from None


def _require_same_model(found: Located, config: Config) -> None:
    """Its arrays are read by name: of another model some would be missing, or left out without a word."""
    theirs, ours = (_parameters(model) for model in (found.config.model, config.model))
    if theirs != ours:
        name = min(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        has, wanted = (its.get(name, "missing") for its in (theirs, ours))
        raise UserError(
            f"training.initial_weights: {found.directory} holds another model: {name} is {has} there and {wanted} in "
            "this configuration; give the section model the sizes of that run"
        )


def _parameters(model: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(build(model).shapes[0]))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}


def _with_weights_of(run: str, state: TrainState) -> TrainState:
    """The state with the parameters and the model's own state of a run's checkpoint."""
    found = _located(run)
    try:
        with found.folders.reading(found.step):
            params = read_tree(found.item("params"), state.params)
            read = {name: its for name, its in state.model_state.items() if name != KNOWLEDGE}
            model_state = state.model_state | {name: read_tree(found.item(name), its) for name, its in read.items()}
    except UserError as error:
        raise UserError(f"training.initial_weights: {error}") from None
    return state.replace(params=params, model_state=model_state)


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """The same tree as `create_state`, of shapes, dtypes and `NamedSharding`s only: nothing is allocated.

    Leaves have the model's shapes. Parameters and their moments are divided over all devices of a slice, by
    `parallel.layout`; the rest is the same everywhere.
    """
    return _abstract(config, build(config.model), mesh)


def state_specs(config: Config, mesh: Mesh) -> TrainState:
    """The tree of PartitionSpecs of the state."""
    family = build(config.model)
    return _specs(config, family, mesh, _shapes(config, family))


def _abstract(config: Config, family: Family, mesh: Mesh) -> TrainState:
    state = _shapes(config, family)

    def place(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state, _specs(config, family, mesh, state))


def _shapes(config: Config, family: Family) -> TrainState:
    params, model_state = nn.meta.unbox(family.shapes)
    optimizer = make_optimizer(config.training, family.roles)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(step, params, jax.eval_shape(optimizer.init, params), model_state)


def _specs(config: Config, family: Family, mesh: Mesh, state: TrainState) -> TrainState:
    layouts = parameter_layouts(family.boxed, mesh)
    specs = jax.tree.map(lambda layout: layout.spec, layouts)
    recipe = make_optimizer(config.training, family.roles)

    def untrained(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    optimizer = optax.tree_utils.tree_map_params(
        recipe,
        lambda leaf, spec: leaf if untrained(leaf) else spec,
        state.optimizer,
        specs,
        transform_non_params=lambda _: P(),
        is_leaf=untrained,
    )
    everywhere: Any = P()
    return TrainState(everywhere, specs, optimizer, jax.tree.map(lambda _: P(), state.model_state))
