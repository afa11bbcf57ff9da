"""The name of what the depth scan keeps for its backward pass under remat "attention" (model/recurrence.py)."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"
"""Name, for jax.checkpoint_policies."""


def keep(x: jax.Array) -> jax.Array:
    """x itself, named: dear to compute again, or the root of much that is cheap."""
    return checkpoint_name(x, KEPT)
