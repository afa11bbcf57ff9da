"""The device mesh of a configuration."""

from __future__ import annotations

import jax
import numpy as np

from dreamer_jax.config.errors import ConfigError
from dreamer_jax.config.schema import MeshConfig

DATA = "data"
"""Name of the mesh axis over which the rows of a batch are divided."""


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """A mesh over the first `config.data` devices.

    Raises:
        ConfigError: if there are fewer devices.
    """
    devices = jax.devices()
    if config.data > len(devices):
        kind = devices[0].platform
        raise ConfigError(
            f"mesh.data: {config.data} devices asked for, but jax sees {len(devices)} ({kind}); "
            f"use --mesh.data {len(devices)} or less",
            key="mesh.data",
        )
    return jax.sharding.Mesh(np.array(devices[: config.data]), (DATA,))
