"""Reading a checkpoint leaf by leaf and row by row, for models too large to hold twice; and writing a run from leaves.

This goes around Orbax to the store below it, because Orbax restores whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.config import Config, LoadedConfig, to_yaml
from dreamer_jax.runs.array_files import open_array
from dreamer_jax.runs.checkpoints import Checkpoints, fingerprints, locate_run
from dreamer_jax.runs.folders import place_of
from dreamer_jax.runs.state import TrainState
from dreamer_jax.runs.step_folders import StepFolders


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint whose arrays stay on disk.

    Attributes:
        directory: the run directory.
        config: the run's configuration.
        step: optimizer steps done.
        meta: `tokenizer` and `data` fingerprints.
    """

    directory: Path
    config: Config
    step: int
    meta: dict[str, str]

    def leaf(self, item: str, path: str) -> Leaf:
        """A float32 array of `params` or `balancing`.

        Args:
            item: "params" or "balancing".
            path: keys joined by dots, such as "layer.expert_attention.gate_up".
        """
        return Leaf(open_array(StepFolders(place_of(self.directory))[self.step] / item, path))


@dataclass(frozen=True)
class Leaf:
    """An array on disk; indexing the leading axes reads what is asked for."""

    store: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.store.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self.store[index].read().result())


def open_model(path: str | Path, step: int | None = None) -> StoredModel:
    """The same checkpoint as `load_run`, without reading its arrays.

    Raises:
        UserError: if there is no run, no checkpoint, or not the step asked for.
    """
    directory, config, chosen = locate_run(path, step)
    meta = StepFolders(place_of(directory)).meta(chosen)
    return StoredModel(directory, config, chosen, fingerprints(meta))


def write_run(
    loaded: LoadedConfig,
    directory: Path,
    step: int,
    params: Any,
    balancing: dict[str, np.ndarray],
    meta: dict[str, str],
    start_optimizer: Callable[[Any], Any],
) -> None:
    """A run directory with one checkpoint, as if trained to `step`, whose optimizer starts fresh.

    `dreamer train` goes on with it; the warm-up starts over, as it must with empty moments.

    Args:
        loaded: the run's configuration.
        directory: an empty folder, which may later be moved to `run.dir`.
        step: optimizer steps done, which is also the place in the data.
        params: float32, as `Dreamer.apply` takes them.
        balancing: router name -> bias.
        meta: `tokenizer` and `data` fingerprints that a resumed run must have.
        start_optimizer: parameters -> the fresh state of their optimizer.
    """
    (directory / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    params = jax.tree.map(jnp.asarray, params)
    optimizer = jax.jit(start_optimizer)(params)
    checkpoints = Checkpoints(directory, loaded.config.checkpoint, meta)
    try:
        bias = {name: jnp.asarray(b) for name, b in balancing.items()}
        checkpoints.save(TrainState(jnp.asarray(step, jnp.int32), params, optimizer, bias))
    finally:
        checkpoints.close()
