"""From a configuration to its model."""

from __future__ import annotations

import importlib

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.config.models import find
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.families.contract import Family


def build(config: ModelConfig, operations: Operations | None = None, observe: bool = False) -> Family:
    """The model of a section `model`.

    Args:
        config: the dataclass of its family (dreamer_jax/config/models).
        operations, observe: see `Family`.
    """
    module = importlib.import_module(find(config.family).core)
    return module.CORE(config, operations, observe)
