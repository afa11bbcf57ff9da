"""The name of what the depth scan keeps for its backward pass under remat "attention" (dreamer_jax/recurrence)."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"
"""Name, for jax.checkpoint_policies."""


def keep(x: jax.Array) -> jax.Array:
    """x itself, named: expensive to compute again, or what much that is cheap is computed from."""
    return checkpoint_name(x, KEPT)
