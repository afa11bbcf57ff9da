"""Settings of the family `huginn_classifier`: Huginn's recurrence under a classifier, for puzzles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.values import Readout


@dataclass(frozen=True)
class HuginnClassifierConfig(HuginnConfig):
    """The settings of Huginn, and how its states answer a puzzle."""

    family: Literal["huginn_classifier"] = "huginn_classifier"  # type: ignore[assignment]
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    positions: Literal["rope", "none"] = "none"
    """Whether the tokens' places reach the rotary positions, or all have place 0: nodes of a graph have no order."""
    readout: Readout = "pair"
    """What answers: pair (two states side by side, a hidden layer with ReLU), pair_linear (without that layer), or cls
    (one state, linear)."""
    classes: int = 2
    """Answers to choose from."""


CONFIG = HuginnClassifierConfig
