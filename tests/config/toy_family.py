"""A family of models from outside of the package, as small as one can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dreamer_jax.config.values import Implementation, require_positive


@dataclass(frozen=True)
class ToyConfig:
    """Toys, which go round and round.

    They learn nothing."""

    family: Literal["toy"] = "toy"
    """Which models."""
    laps: int = 4
    """How often a toy goes round."""
    hidden_size: int = 8
    """h: size of a toy."""
    vocab_size: int = 512
    """V: rows of the embedding."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Compute precision."""
    implementation: Implementation = "auto"
    """Backend."""

    def __post_init__(self) -> None:
        require_positive(self, "model")


class Toy:
    """What `families.build` makes of a `ToyConfig`."""

    def __init__(self, config: ToyConfig, *others: Any):
        self.config = config


CONFIG = ToyConfig
CORE = Toy
