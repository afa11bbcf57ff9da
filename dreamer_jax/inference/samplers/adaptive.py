"""Adaptive: a token stops going deeper when a criterion says that further depths would change little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from dreamer_jax.inference.samplers import one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress, Sampler
from dreamer_jax.inference.samplers.criteria import CRITERIA, Name
from dreamer_jax.inference.sampling import LARGEST


@dataclass(frozen=True)
class Adaptive(Sampler):
    """A token goes through the depths until a criterion says that further ones would change little; a model that halts
    by itself may also stop it. Prompts always go through all depths. Rows of a batch don't wait for each other."""

    name: ClassVar[str] = "adaptive"
    early: ClassVar[bool] = True

    criterion: Name = "latent-diff"
    """What is compared with the check before: the residual stream (latent-diff, cosine), or the prediction, which takes
    the head at every check (entropy-diff, kl, minp-kl, argmax-stability)."""
    threshold: float = 0.0
    """A token stops when the criterion's value is below; argmax-stability: when the likeliest token has stayed the same
    at so many checks. 0: that of the published code (0.03, 1e-3, 1e-3, 1e-3, 1e-5 and 5, in the order of criterion)."""
    min_depth: int = 1
    """Depths that every token takes; the first check is after them."""
    every: int = 1
    """Depths between two checks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within = 0 <= self.threshold <= LARGEST
        self._require(within, "threshold", f"must be from 0 (that of the published code) to {LARGEST:g}")
        for key in ("min_depth", "every"):
            self._require(getattr(self, key) >= 1, key, "must be 1 or more")

    def refusal(self, family) -> str | None:
        """Depths have to be alike, or their keys interchangeable."""
        flags = family.flags
        if flags.recurrent or flags.shares_caches:
            return None
        needs = "the same weights at every depth, or keys that may stand in for those of other depths"
        return f"early exit needs {needs}; {family.headline()} has neither"

    @property
    def program(self) -> Adaptive:
        """The criterion decides the code."""
        return Adaptive(self.criterion)

    def numbers(self):
        """The others."""
        threshold = self.threshold or CRITERIA[self.criterion].threshold
        return np.float32(threshold), np.int32(self.min_depth), np.int32(self.every)

    def carry(self, model, rows: int) -> Carried:
        """Nothing is on its way."""
        return one_by_one.carry(model, rows, rule(self.criterion, jnp.float32(0)))

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """One token after another."""
        return one_by_one.decode(choosing, model, progress, slots, carried, asked, self.rule_for)

    def rule_for(self, settings) -> one_by_one.Rule:
        """Of rows with these `numbers`."""
        return rule(self.criterion, *settings)


def rule(criterion: Name, threshold, least=1, every=1) -> one_by_one.Rule:
    """The rule of a criterion."""
    its = CRITERIA[criterion]

    def stream(model, flight):
        return model.family.stream(flight.state)[:, 0].astype(jnp.float32)

    def start(model, flight):
        return its.start(stream(model, flight), model.config.vocab_size)

    def check(model, flight, positions, slots, before):
        # What a coda leaves is written again when the token leaves for good.
        hidden = model.leave(flight, positions, slots)[0] if its.reads_logits else None
        value, seen = its.compare(before, stream(model, flight) if hidden is None else model.logits(hidden)[:, 0])
        return its.stops(value, threshold), seen

    return one_by_one.Rule(start, check, least, every)
