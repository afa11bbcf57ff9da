"""From a configuration to its model."""

from __future__ import annotations

import importlib

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.config.models import find
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Family


def build(config: ModelConfig, operations: Operations | None = None, observe: bool = False) -> Family:
    """The model of a section `model`.

    Args:
        config: the dataclass of its family (dreamer_jax/config/models).
        operations, observe: see `Family`.

    Raises:
        UserError: its class isn't whole.
    """
    core = importlib.import_module(find(config.family).core).CORE
    if lacking := sorted(getattr(core, "__abstractmethods__", ())):
        raise UserError(f"family {config.family}: its class {core.__name__} lacks {', '.join(lacking)}")
    family = core(config, operations, observe)
    if isinstance(family, Family) and family.flags.halts and type(family).finished is Family.finished:
        raise UserError(f"family {config.family}: its flags say halts=True, and `finished` isn't there to say when")
    return family
