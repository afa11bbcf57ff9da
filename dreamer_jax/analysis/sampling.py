"""The statistics during training: a few rows of a training batch now and then, as numbers for TensorBoard."""

from __future__ import annotations

from typing import Any

import jax

from dreamer_jax.analysis.collection import add, make_observer
from dreamer_jax.analysis.summary import scalars, summarise
from dreamer_jax.config.sections import Config
from dreamer_jax.data.records import Batch


class Sampler:
    """Looks at one row on every device: about a forward pass of 1/rows of a batch, and the head at every depth.

    Args:
        config: of the run.
        mesh: of the train step.
    """

    def __init__(self, config: Config, mesh: jax.sharding.Mesh):
        self._model = config.model
        self._share = config.training.batch_size // mesh.size
        self.observer = make_observer(config.model, mesh)

    def sample(self, batch: Batch) -> Batch:
        """The first row of every device's part of a batch, or of a process's rows of it: [devices, S]."""
        return {name: values[:: self._share] for name, values in batch.items()}

    def scalars(self, sums: Any, model_state: Any) -> dict[str, float]:
        """What `scalars` makes of the observer's sums."""
        return scalars(summarise(self._model, add(None, sums), jax.device_get(model_state)))
