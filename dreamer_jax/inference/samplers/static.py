"""Static: every token takes all depths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dreamer_jax.inference.samplers import one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress, Sampler


@dataclass(frozen=True)
class Static(Sampler):
    """Every token takes all depths, as many as --depth says; in a model that halts by itself it stops when it does."""

    name: ClassVar[str] = "static"

    def carry(self, model, rows: int) -> Carried:
        """Nothing, where all rows take all depths together."""
        return one_by_one.carry(model, rows) if model.family.flags.halts else Carried()

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """One token after another."""
        through = one_by_one.decode if model.family.flags.halts else one_by_one.decode_in_step
        return through(choosing, model, progress, slots, carried, asked)
