"""Reading a checkpoint leaf by leaf and row by row, for models too large to hold twice; and writing a run from leaves.

This goes around Orbax to the store below it, because Orbax restores whole arrays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from dreamer_jax.config import Config, LoadedConfig, to_yaml
from dreamer_jax.runs.array_files import open_array
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.models import Located, averaged_steps, locate_run
from dreamer_jax.runs.state import TrainState


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint whose arrays stay on disk.

    Attributes:
        found: where it is.
        steps: the checkpoints whose parameters are averaged, the newest first.
    """

    found: Located
    steps: tuple[int, ...]

    @property
    def directory(self) -> epath.Path:
        """The run directory."""
        return self.found.directory

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.found.config

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.found.step

    @property
    def meta(self) -> dict[str, str]:
        """`tokenizer` and `data` fingerprints."""
        return self.found.meta

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """The block in which leaves are opened and read; see `StepFolders.reading`."""
        return self.found.folders.reading(*self.steps)

    def leaf(self, item: str, path: str) -> Leaf:
        """A float32 array of the parameters or of the model's own state.

        Args:
            item: "params", or a collection such as "balancing".
            path: keys joined by dots, such as "layer.expert_attention.gate_up".
        """
        steps = self.steps if item == "params" else (self.step,)
        return Leaf(tuple(open_array(self.found.folders[step] / item, path) for step in steps))


@dataclass(frozen=True)
class Leaf:
    """An array on disk, or the mean of several; indexing the leading axes reads what is asked for."""

    stores: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.stores[0].shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        values = [np.asarray(store[index].read().result()) for store in self.stores]
        if len(values) == 1:
            return values[0]
        return functools.reduce(np.add, values) / np.float32(len(values))


def open_model(path: str | Path, step: int | None = None, average: int = 1) -> StoredModel:
    """The same weights as `load_run`, without reading them.

    Raises:
        UserError: if there is no run, no checkpoint, not the step asked for, or not so many to average.
    """
    found = locate_run(path, step)
    return StoredModel(found, tuple(averaged_steps(found, average)))


def write_run(
    loaded: LoadedConfig,
    directory: Path,
    step: int,
    params: Any,
    model_state: dict[str, Any],
    meta: dict[str, str],
    start_optimizer: Callable[[Any], Any],
) -> None:
    """A run directory with one checkpoint, as if trained to `step`, whose optimizer starts fresh.

    `dreamer train` goes on with it; the warm-up starts over, as it must with empty moments.

    Args:
        loaded: the run's configuration.
        directory: an empty folder, which may later be moved to `run.dir`.
        step: optimizer steps done, which is also the place in the data.
        params: float32.
        model_state: the model's own, by collection.
        meta: `tokenizer` and `data` fingerprints that a resumed run must have.
        start_optimizer: parameters -> the fresh state of their optimizer.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    (directory / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    params = jax.tree.map(jnp.asarray, params)
    optimizer = jax.jit(start_optimizer)(params)
    checkpoints = Checkpoints(directory, loaded.config.checkpoint, meta, say=lambda _: None)
    try:
        own = jax.tree.map(jnp.asarray, model_state)
        checkpoints.save(TrainState(jnp.asarray(step, jnp.int32), params, optimizer, own))
    finally:
        checkpoints.close()
    if checkpoints.failed:
        raise OSError(f"the checkpoint was not saved: {checkpoints.failed}")
