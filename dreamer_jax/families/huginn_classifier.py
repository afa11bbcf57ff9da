"""Huginn's recurrence under a classifier: the puzzles of `depth_recurrent` for another model."""

from __future__ import annotations

from dreamer_jax.families.huginn import Huginn
from dreamer_jax.families.puzzles import PuzzleSolver


class HuginnClassifier(PuzzleSolver, Huginn):
    """See `PuzzleSolver`."""


CORE = HuginnClassifier
