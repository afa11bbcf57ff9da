"""Static: every token takes all depths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from dreamer_jax.inference.model import through_depths
from dreamer_jax.inference.samplers import one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress, Sampler


@dataclass(frozen=True)
class Static(Sampler):
    """Every token takes all depths, as many as --depth says; in a model that halts by itself it stops when it does."""

    name: ClassVar[str] = "static"

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """One token after another."""

        def through(tokens, positions, slots):
            if model.family.flags.halts:
                return one_by_one.until_stopped(model, tokens, positions, slots)
            return *through_depths(model, tokens, positions, slots), jnp.full(
                tokens.shape[0], model.total_depth, jnp.int32
            )

        return one_by_one.decode(choosing, model, progress, slots, asked, through)
