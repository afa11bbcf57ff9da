"""What a train step changes and a checkpoint holds."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax


class TrainState(flax.struct.PyTreeNode):
    """Everything that a checkpoint holds beside the configuration.

    Attributes:
        step: scalar int32, optimizer steps done; also the position in the data, which is a function of it.
        params: float32 master weights.
        optimizer: optax state, float32.
        balancing: router name -> balancing bias, float32 (Eq. 3).
    """

    step: jax.Array
    params: Any
    optimizer: Any
    balancing: dict[str, jax.Array]
