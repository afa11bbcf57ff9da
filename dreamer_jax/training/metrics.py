"""What is measured while training."""

from __future__ import annotations

from dreamer_jax.budget import analytic
from dreamer_jax.chips import Chip
from dreamer_jax.config.sections import Config
from dreamer_jax.families import build
from dreamer_jax.training.work import work_of


def model_flop_utilisation(
    config: Config, tokens_per_second: float, chip: Chip | None, steps: int | None = None
) -> float | None:
    """Model FLOPs done a second over the chips' peak; None where the peak isn't known.

    Model FLOPs of a training token: three times the forward's matrix products (once forward, twice backward), with
    every depth counted that steps of the run, or its first `steps`, go to on average, and the scores of the average
    context within a row, but no recomputation and no padding of blocks.
    """
    if chip is None:
        return None
    flops, _ = analytic.training_flops(build(config.model), config.data.places, work_of(config, steps))
    return config.data.copies * flops * tokens_per_second / (chip.peak_flops * config.mesh.size)
