"""The section `recurrence`: how deep train steps go, and what else their depths are asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from dreamer_jax.config.values import require, require_positive

STEPPED_TASKS = ("boolean", "arithmetic", "induction", "problems", "permutations")
"""Tasks whose steps have results that are known."""


@dataclass(frozen=True)
class RecurrenceConfig:
    """How deep train steps go; evaluation and generation go to model.depth. See docs/depth.md."""

    draw: Literal["model", "fixed", "uniform", "poisson_lognormal", "exponential"] = "model"
    """model: as the family does, model.depth for most. fixed: to `mean`, or `most` if that is less. The others draw it
    anew for every step: each depth from least to most alike, or around `mean` as Huginn does (Poisson with a log-normal
    rate), or from an exponential distribution."""
    least: int = 1
    """The least depth that is drawn, and where a curriculum starts."""
    most: int = 0
    """The most; memory is needed for so many. 0: model.depth, or four times the mean where draws have a long tail."""
    mean: int = 0
    """Of fixed, poisson_lognormal and exponential. 0: model.depth."""
    sigma: float = 0.5
    """Spread of the log-normal rate."""
    curriculum: Literal["linear", "one_minus_sqrt"] = "linear"
    """How `mean`, or with uniform `most`, grows from `least` over the share t of curriculum_steps: as t, or as
    1 - sqrt(1 - t), which stays shallow for longer."""
    curriculum_steps: int = 0
    """Steps over which it grows; 0: it is what it is from the start."""
    by: Literal["step", "row"] = "step"
    """Whether all rows of a step go equally deep, or each to a depth of its own."""
    groups: int = 4
    """With by row: rows are sorted into so many groups, each as deep as its deepest row."""
    differentiated: int = 0
    """Depths that are differentiated, the last ones (truncated backpropagation). 0: all."""
    scored: int = 1
    """Depths after which the loss is taken, the last ones."""
    scored_weight: float = 1.0
    """Of the mean loss of the scored depths before the last, beside the last one's."""
    settling: float = 0.0
    """Weight of a loss that asks the last depth to change little: its relative squared change of the stream, mean over
    the targets (a terminal fixed-point loss)."""
    steps: float = 0.0
    """Weight of a loss that asks the depths of a pass for the results of a task's steps, one after the other (RELAY).
    The tasks boolean, arithmetic, induction, problems and permutations, as bytes."""
    depths_per_step: int = 1
    """With steps: depths that each of them has; step n is asked for after n times as many."""
    jacobian: float = 0.0
    """Weight of a loss that asks the last depth to be a gentle step: an estimate, by one random vector a row, of the
    mean square of its Jacobian's columns. A step of its own is computed for it, without kernels."""

    def __post_init__(self) -> None:
        may_be_zero = ("most", "mean", "sigma", "curriculum_steps", "differentiated", "settling", "steps", "jacobian")
        require_positive(self, "recurrence", allow_zero=may_be_zero)
        require(self.sigma <= 10, "recurrence.sigma", f"{self.sigma:g} is too large; it must be at most 10")
        require(
            self.most == 0 or self.least <= self.most, "recurrence.most", f"{self.most} is below least {self.least}"
        )
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        require(
            self.draw != "model" or not changed,
            f"recurrence.{(changed or ['draw'])[0]}",
            "has no meaning where recurrence.draw is model; choose fixed, uniform, poisson_lognormal or exponential",
        )
        drawn = self.draw in ("uniform", "poisson_lognormal", "exponential")
        require(
            self.by == "step" or drawn, "recurrence.by", f"row: recurrence.draw {self.draw} gives all rows one depth"
        )
        require(self.draw != "uniform" or not self.mean, "recurrence.mean", "uniform draws have least and most")
