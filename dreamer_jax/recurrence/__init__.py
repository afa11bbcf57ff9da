"""The depth scan: one step applied at every depth, its remat policies and its tape. Knows no family."""

from dreamer_jax.recurrence.scan import DepthScan, Scanned, Stepped
from dreamer_jax.recurrence.weights import Weights

__all__ = ["DepthScan", "Scanned", "Stepped", "Weights"]
