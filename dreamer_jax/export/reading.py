"""From a folder to a run: what PyTorch has fine-tuned goes on in JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.errors import UserError
from dreamer_jax.export.description import Description, form_of, read_description
from dreamer_jax.export.form import abstract, at
from dreamer_jax.export.writing import written_aside
from dreamer_jax.families import build
from dreamer_jax.runs.models import TrainedModel
from dreamer_jax.runs.safetensors_files import Stored, open_tensors


def import_run(folder: Path, out: Path) -> Description:
    """Write the run directory of a folder's model: one checkpoint, with a fresh optimizer.

    A folded model becomes one whose shared experts are zero. No code of the folder is executed.

    Args:
        folder: written by `dreamer export`, or by `save_pretrained` from such a folder; or a published one, see
            docs/export.md.
        out: the run directory; nothing may exist there.

    Raises:
        UserError: the folder is incomplete, damaged or of a later version, or `out` exists.
    """
    description = read_description(folder)
    tensors = checked_tensors(folder, description)
    write_model(description, out, lambda: to_jax(tensors, description))
    return description


def write_model(description: Description, out: Path, make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    """Write a run directory: one checkpoint, with a fresh optimizer.

    Args:
        description: of the model and its run.
        out: the run directory; nothing may exist there.
        make: () -> (params, model state), float32.

    Raises:
        UserError: `out` exists or can't be written.
    """
    from dreamer_jax.runs.leaves import write_run
    from dreamer_jax.training.optimizer import make_optimizer

    with written_aside(out) as aside:
        params, model_state = make()
        loaded = description.loaded(str(out))
        start = make_optimizer(loaded.config.training, build(loaded.config.model).roles).init
        write_run(loaded, aside, description.step, params, model_state, description.meta, start)


def read_model(folder: Path) -> TrainedModel:
    """The model of a folder, as `import_run` takes it, without writing a run.

    Raises:
        UserError: the folder is incomplete, damaged or of a later version.
    """
    description = read_description(folder)
    params, model_state = to_jax(checked_tensors(folder, description), description)
    params, model_state = jax.tree.map(jnp.asarray, (params, model_state))
    return TrainedModel(description.config, description.step, params, model_state, description.meta)


def open_family(
    folder: Path, description: Description, dtype: str, operations: Operations | None = None, **settings: Any
) -> tuple[Any, Any]:
    """The family of a folder's model in a precision, and the parameters that it computes with; `settings` of the model
    count in place of the description's."""
    family = build(dataclasses.replace(description.model, dtype=dtype, **settings), operations)
    params, _ = to_jax(checked_tensors(folder, description), description)
    return family, family.cast(jax.tree.map(jnp.asarray, params))


def checked_tensors(folder: Path, description: Description) -> dict[str, Stored]:
    """The tensors of a folder, which are exactly those its configuration asks for.

    Raises:
        UserError: one is missing, too many, or of another shape or dtype.
    """
    form = form_of(description.config)
    tensors = form.without_derived(folder, open_tensors(folder), description)
    shapes = form.shapes(description)
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{folder}: the tensor {name} is missing")
        if tensors[name].shape != shape:
            raise UserError(f"{folder}: {name} has shape {tensors[name].shape} where config.json asks for {shape}")
    others = sorted(set(tensors) - set(shapes))
    if others:
        raise UserError(f"{folder}: the tensor {others[0]} is not part of the model config.json describes")
    return tensors


def to_jax(tensors: dict[str, Stored], description: Description) -> tuple[Any, dict[str, Any]]:
    """(params, model state) in float32, read tensor by tensor; folded shared experts become zeros.

    Raises:
        UserError: a number isn't finite.
    """
    trees = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract(description.model))
    for leaf in form_of(description.config).leaves(tensors, description):
        if not np.isfinite(leaf.values).all():
            folder = next(iter(tensors.values())).path.parent
            raise UserError(f"{folder}: {leaf.path} holds numbers that aren't finite, as training leaves that diverged")
        target = at(trees[leaf.item], leaf.path)
        (target if leaf.layer is None else target[leaf.layer])[...] = leaf.values
    return trees.pop("params"), trees
