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
        model_state: the model's own state by collection, such as balancing biases (Eq. 3).
    """

    step: jax.Array
    params: Any
    optimizer: Any
    model_state: dict[str, Any]
