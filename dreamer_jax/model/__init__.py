"""The model: tokens to logits and auxiliaries, pure functions of parameters. Knows no mesh, no optimizer, no I/O."""

from dreamer_jax.model.dreamer import Dreamer, Output, initialise
from dreamer_jax.model.operations import Operations, resolve_operations
from dreamer_jax.model.routing import update_balancing

__all__ = ["Dreamer", "Operations", "Output", "initialise", "resolve_operations", "update_balancing"]
