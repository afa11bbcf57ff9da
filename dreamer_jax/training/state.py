"""What a train step changes."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.config.schema import Config
from dreamer_jax.model import initialise
from dreamer_jax.training.optimizer import make_optimizer


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


def create_state(config: Config) -> TrainState:
    """A fresh state from `run.seed`."""
    params, balancing = initialise(config.model, jax.random.key(config.run.seed))
    optimizer = jax.jit(make_optimizer(config.training).init)(params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer, balancing)


def abstract_state(config: Config) -> TrainState:
    """The same tree as `create_state`, of shapes and dtypes only: nothing is allocated."""
    return jax.eval_shape(lambda: create_state(config))
