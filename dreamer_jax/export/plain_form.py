"""Folders of families that have no published form: settings under their own names, and a tensor for every leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from dreamer_jax.blocks.parameters import FLOAT32
from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.export.form import (
    CODES,
    Description,
    Form,
    Leaf,
    abstract,
    at,
    checked,
    dtype_of,
    read_training_run,
    training_run,
)
from dreamer_jax.families import build as build_family
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import Stored, Tensor, open_tensors

NOT_DESCRIBED = ("family", "dtype", "implementation")
"""Settings that config.json leaves to `model_type`, to the tensors, and to the machine."""


class PlainForm(Form):
    """What such families share; matrices are [out, in] in PyTorch."""

    config: ClassVar[type[ModelConfig]]
    """The section `model`."""
    names: ClassVar[Mapping[str, str]]
    """Leaf, its path joined by dots -> tensor, in the order of the forward pass; a model has the first, not all."""
    tables: ClassVar[tuple[str, ...]]
    """Leaves that are as they are, not transposed."""
    rows: ClassVar[tuple[str, ...]] = ()
    """Leaves [h] whose tensors are matrices [1, h]."""

    def described(self, description: Description) -> dict[str, Any]:
        """What config.json says of the model and its run."""
        fields = dataclasses.asdict(description.model)
        return {
            "model_type": self.model_type,
            "torch_dtype": description.dtype,
            **{name: value for name, value in fields.items() if name not in NOT_DESCRIBED},
            "training_run": training_run(description),
        }

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """The dtype is read off the tensors; what config.json says of the model counts more than the run."""
        path = folder / "config.json"
        dtype = dtype_of(folder, open_tensors(folder), next(iter(self.names.values())))
        values, step, meta = read_training_run(path, content)
        for field in dataclasses.fields(self.config):  # type: ignore[arg-type]
            if field.name not in NOT_DESCRIBED and field.name in content:
                values[f"model.{field.name}"] = content[field.name]
        values = {key: checked(path, key, value, self.config) for key, value in values.items()}
        values |= {"model.family": self.family, "model.dtype": values.get("model.dtype", dtype)}
        loaded = build({key: Setting(value, str(path)) for key, value in values.items()})
        return Description(loaded.config, loaded.origins, dtype, False, step, meta)

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """All of them are small; biases, norms and gates stay float32, as in JAX."""
        roles = build_family(description.model).roles

        def tensor(leaf: str, name: str) -> Tensor:
            values = self._to_tensor(leaf, stored.leaf("params", leaf)[:])
            dtype = "float32" if at(roles, leaf) in FLOAT32 else description.dtype
            return Tensor(name, CODES[dtype], values.shape, lambda start, stop: values[start:stop])

        return [tensor(leaf, name) for leaf, name in self.present(description)]

    def shapes(self, description: Description) -> dict[str, tuple[int, ...]]:
        """Those of the leaves, matrices transposed."""
        params = abstract(description.model)["params"]
        present = self.present(description)
        return {name: self._to_tensor(leaf, np.empty(at(params, leaf).shape)).shape for leaf, name in present}

    def leaves(self, tensors: Mapping[str, Stored], description: Description) -> Iterator[Leaf]:
        """Matrices transposed back."""
        for leaf, name in self.present(description):
            values = tensors[name].array()
            yield Leaf("params", leaf, None, values[0] if leaf in self.rows else self._to_tensor(leaf, values))

    def present(self, description: Description) -> list[tuple[str, str]]:
        """(leaf, tensor) of those that the model has."""
        leaves = jax.tree_util.tree_leaves_with_path(abstract(description.model)["params"])
        has = {".".join(key.key for key in path) for path, _ in leaves}
        return [(leaf, name) for leaf, name in self.names.items() if leaf in has]

    def _to_tensor(self, leaf: str, values: np.ndarray) -> np.ndarray:
        """A leaf as its tensor; of a matrix also the other way round."""
        if leaf in self.rows:
            return values[None]
        return values.T if values.ndim == 2 and leaf not in self.tables else values
