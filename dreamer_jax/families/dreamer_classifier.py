"""Dreamer's recurrence under a classifier: the puzzles of `depth_recurrent` for another model."""

from __future__ import annotations

from dreamer_jax.families.dreamer import Dreamer
from dreamer_jax.families.puzzles import PuzzleSolver


class DreamerClassifier(PuzzleSolver, Dreamer):
    """See `PuzzleSolver`."""


CORE = DreamerClassifier
