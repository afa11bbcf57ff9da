"""The models: one contract, and one file a family."""

from dreamer_jax.families.contract import KNOWLEDGE, Drawn, Family, Flags, Knob, Pass, depth_of
from dreamer_jax.families.forward import forward, initialise
from dreamer_jax.families.registry import build

__all__ = ["KNOWLEDGE", "Drawn", "Family", "Flags", "Knob", "Pass", "build", "depth_of", "forward", "initialise"]
