"""How positions go through the depths while a text is generated: one file a sampler. docs/samplers.md explains them."""

from dreamer_jax.inference.samplers.adaptive import Adaptive
from dreamer_jax.inference.samplers.contract import Sampler
from dreamer_jax.inference.samplers.diffusion_forcing import DiffusionForcing
from dreamer_jax.inference.samplers.lossless import Lossless
from dreamer_jax.inference.samplers.speculative import Speculative
from dreamer_jax.inference.samplers.static import Static

SAMPLERS: dict[str, type[Sampler]] = {
    each.name: each for each in (Static, Adaptive, Speculative, Lossless, DiffusionForcing)
}
"""By name."""

__all__ = ["SAMPLERS", "Adaptive", "DiffusionForcing", "Lossless", "Sampler", "Speculative", "Static"]
