"""From a configuration to its model."""

from __future__ import annotations

import importlib

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.config.models import BUILT_IN, find
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families.checking import check
from dreamer_jax.families.contract import Family


def build(config: ModelConfig, operations: Operations | None = None, observe: bool = False) -> Family:
    """The model of a section `model`.

    Args:
        config: the dataclass of its family (dreamer_jax/config/models).
        operations, observe: see `Family`.

    Raises:
        UserError: its class isn't whole, or one from outside of the package doesn't keep the contract.
    """
    registered = find(config.family)
    core = importlib.import_module(registered.core).CORE
    if not (isinstance(core, type) and issubclass(core, Family)):
        raise UserError(f"family {config.family}: CORE must be a class derived from dreamer_jax.families.Family")
    if lacking := sorted(getattr(core, "__abstractmethods__", ())):
        raise UserError(f"family {config.family}: its class {core.__name__} lacks {', '.join(lacking)}")
    if registered.origin != BUILT_IN:
        check(core(config))  # as it is trained: `observe` puts other things in the place of counts
    return core(config, operations, observe)
