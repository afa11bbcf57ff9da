"""From a folder to a run: what PyTorch has fine-tuned goes on in JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.description import Description, read_description
from dreamer_jax.export.names import names_of
from dreamer_jax.export.safetensors_files import Stored, open_tensors
from dreamer_jax.export.writing import written_aside
from dreamer_jax.model import initialise


def import_run(folder: Path, out: Path) -> Description:
    """Write the run directory of a folder's model: one checkpoint, with a fresh optimizer.

    A folded model becomes one whose shared experts are zero. No code of the folder is executed.

    Args:
        folder: written by `dreamer export`, or by `save_pretrained` from such a folder.
        out: the run directory; nothing may exist there.

    Raises:
        UserError: the folder is incomplete, damaged or of a later version, or `out` exists.
    """
    from dreamer_jax.runs.leaves import write_run
    from dreamer_jax.training.optimizer import make_optimizer

    description = read_description(folder)
    tensors = checked_tensors(folder, description)
    with written_aside(out) as aside:
        params, balancing = to_jax(tensors, description.config.model, description.keep_shared)
        loaded = description.loaded(str(out))
        start = make_optimizer(loaded.config.training).init
        write_run(loaded, aside, description.step, params, balancing, description.meta, start)
    return description


def checked_tensors(folder: Path, description: Description) -> dict[str, Stored]:
    """The tensors of a folder, which are exactly those its configuration asks for.

    Raises:
        UserError: one is missing, too many, or of another shape or dtype.
    """
    tensors = open_tensors(folder)
    model = description.config.model
    shapes = expected_shapes(model, description.keep_shared)
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{folder}: the tensor {name} is missing")
        if tensors[name].shape != shape:
            raise UserError(f"{folder}: {name} has shape {tensors[name].shape} where config.json asks for {shape}")
    others = sorted(set(tensors) - set(shapes))
    if others:
        raise UserError(f"{folder}: the tensor {others[0]} is not part of the model config.json describes")
    return tensors


def expected_shapes(model: DreamerConfig, keep_shared: bool) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape."""
    trees = _abstract(model)
    found = {}
    for name in names_of(model, keep_shared):
        leaf = trees[name.item]
        for key in name.leaf.split("."):
            leaf = leaf[key]
        found[name.tensor] = tuple(leaf.shape if name.layer is None else leaf.shape[1:])
    return found


def to_jax(tensors: dict[str, Stored], model: DreamerConfig, keep_shared: bool) -> tuple[Any, dict[str, np.ndarray]]:
    """(params, balancing) in float32, as `Dreamer.apply` takes them; folded shared experts become zeros."""
    trees = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), _abstract(model))
    for name in names_of(model, keep_shared):
        *scope, last = name.leaf.split(".")
        node = trees[name.item]
        for key in scope:
            node = node[key]
        target = node[last] if name.layer is None else node[last][name.layer]
        target[...] = tensors[name.tensor].array()
    return trees["params"], trees["balancing"]


def _abstract(model: DreamerConfig) -> dict[str, Any]:
    params, balancing = jax.eval_shape(lambda: initialise(model, jax.random.key(0)))
    return {"params": params, "balancing": balancing}
