"""Section 3.8: make one model cost what another costs, by coordinate descent over its family's knobs.

For Dreamer the expert size F is searched until the FLOPs per token are closest to the target, then the number of
experts E until the parameters are closest, and again, until nothing changes. The descent starts from the baseline's
own values (its experts, all its layers' together when the model is recurrent), never from the model's, so that the
result doesn't depend on what happens to stand in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dreamer_jax.budget import analytic, memory
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, Knob, build

Hold = Literal["both", "flops", "params"]
HOLDS = {"flops": ("flops_per_token",), "params": ("params",), "both": ("flops_per_token", "params")}
TITLES = {"params": "parameters", "flops_per_token": "FLOPs/token", "memory_bytes": "memory (bytes)"}
"""Of the quantities, for people."""


@dataclass(frozen=True)
class Cost:
    """What matched models share: parameters as stored for training, forward FLOPs, bytes of one generation.

    flops_per_token is of matrix products only, after folding, at the average context of the generation.
    """

    params: int
    flops_per_token: float
    memory_bytes: int


@dataclass(frozen=True)
class Target:
    """Budgets to meet, and where the descent starts: knob -> value. None: not asked for; memory is never searched."""

    params: int | None
    flops_per_token: float | None
    starts: Mapping[str, int]
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Iteration:
    """One search of the descent: the knobs' values it ended at and their gaps to the target, see `gaps`."""

    searched: str
    values: Mapping[str, int]
    gaps_percent: dict[str, float]


@dataclass(frozen=True)
class Match:
    """A matched model, its cost, and how the descent got there."""

    family: Family
    cost: Cost
    target: Target
    iterations: tuple[Iteration, ...]

    @property
    def gaps_percent(self) -> dict[str, float]:
        """See `gaps`."""
        return gaps(self.cost, self.target)


def cost(family: Family, context: int) -> Cost:
    """Cost of a model that generates `context` tokens (1024 in Table 1)."""
    average = analytic.average_context(context, family.flags.causal)
    return Cost(
        params=int(analytic.total(analytic.parameters(family))),
        flops_per_token=analytic.total(analytic.matmul_flops(family, average)),
        memory_bytes=sum(memory.generation(family, context).values()),
    )


def target_of(baseline: Family, family: Family, context: int) -> Target:
    """The cost of a baseline, and where the search for a model of another family or variant starts."""
    its = cost(baseline, context)
    return Target(its.params, its.flops_per_token, family.knob_starts(baseline), its.memory_bytes)


def match(family: Family, target: Target, context: int, granularity: int = 8, hold: Hold = "both") -> Match:
    """The model with the knobs' values that come closest to the target.

    Args:
        family: everything but its knobs is kept.
        target: budgets, and where to start. With one budget only, the other knobs are kept too.
        context: tokens of a generated sequence, for FLOPs and memory.
        granularity: knobs that aren't fine move by this.
        hold: flops moves only what moves the FLOPs, params only what moves the parameters, both moves both.

    Raises:
        UserError: the model can't be matched, or a budget is below what its other parts need alone.
    """
    wanted = [quantity for quantity in HOLDS[hold] if getattr(target, quantity) is not None]
    knobs = [knob for knob in family.knobs() if knob.moves in wanted]
    if not knobs:
        others = {knob.moves: knob.key for knob in family.knobs()}
        instead = " and ".join(f"{key} for its {TITLES[moves]}" for moves, key in others.items())
        raise UserError(
            f"a model of the family {family.config.family} has no setting that would be searched for its "
            f"{' and '.join(TITLES[quantity] for quantity in wanted)}" + (f"; it has {instead}" if instead else "")
        )
    if len(wanted) == 2:
        starts = {knob.key: _start(target.starts[knob.key], knob, granularity) for knob in knobs}
        family = changed(family, starts)
    _require_room(family, knobs, target, context)
    iterations: list[Iteration] = []
    seen: list[Family] = []
    while family not in seen:
        seen.append(family)
        for knob in knobs:
            family = _search(family, knob, getattr(target, knob.moves), context, 1 if knob.fine else granularity)
            values = {each.key: getattr(family.config, each.key) for each in family.knobs()}
            iterations.append(Iteration(knob.key, values, gaps(cost(family, context), target)))
    # Usually the descent has ended at a fixed point; where it goes in a circle, its best point is taken.
    best = min(seen[seen.index(family) :], key=lambda each: sum(map(abs, gaps(cost(each, context), target).values())))
    return Match(best, cost(best, context), target, tuple(iterations))


def changed(family: Family, values: Mapping[str, object]) -> Family:
    """The model with other values of some settings."""
    return build(replace(family.config, **values), family.operations)


def gaps(its: Cost, target: Target) -> dict[str, float]:
    """Quantity -> (ours / target - 1) in percent, of each quantity the target has."""
    budgets = {name: getattr(target, name) for name in ("params", "flops_per_token", "memory_bytes")}
    return {name: 100 * (getattr(its, name) / goal - 1) for name, goal in budgets.items() if goal is not None}


def _search(family: Family, knob: Knob, budget: float, context: int, step: int) -> Family:
    def quantity(multiple: int) -> float:
        return getattr(cost(changed(family, {knob.key: multiple * step}), context), knob.moves)

    return changed(family, {knob.key: step * _closest(quantity, budget, smallest=-(-knob.smallest // step))})


def _closest(quantity: Callable[[int], float], goal: float, smallest: int) -> int:
    """The integer from `smallest` on whose (growing) quantity is closest to the goal, by binary search."""
    low, high = smallest, 2 * smallest
    while quantity(high) < goal:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if quantity(middle) < goal else (low, middle)
    return min((low, high), key=lambda each: abs(quantity(each) - goal))


def _start(value: int, knob: Knob, granularity: int) -> int:
    if knob.fine:
        return max(value, knob.smallest)
    return granularity * max(1, round(value / granularity))


def _require_room(family: Family, knobs: list[Knob], target: Target, context: int) -> None:
    """The parts that no search moves must leave something for those that it moves, made as small as they can be."""
    family = changed(family, {knob.key: knob.smallest for knob in knobs if knob.moves == "params"})
    moved = {knob.part for knob in knobs}
    average = analytic.average_context(context, family.flags.causal)
    counts = {
        "FLOPs per token": ("flops_per_token", analytic.matmul_flops(family, average)),
        "parameters": ("params", analytic.parameters(family)),
    }
    for what, (quantity, parts) in counts.items():
        budget = getattr(target, quantity) if quantity in {knob.moves for knob in knobs} else None
        others = {part: number for part, number in parts.items() if part not in moved}
        needed = sum(others.values())
        if budget is None or needed < budget:
            continue
        largest = max(others, key=lambda part: others[part])
        remedy = family.remedies.get(largest, "model.hidden_size")
        raise UserError(
            f"the {what} of this {family.headline().partition(',')[0]} can't be matched: without "
            f"{' and '.join(sorted(moved))} its parts take "
            f"{short(needed)}, {short(needed - budget)} more than the target of {short(budget)}; the largest "
            f"is {largest} with {short(others[largest])}. Use a smaller {remedy}, or a larger target"
        )


def short(number: float) -> str:
    """1234567 -> '1.2346 M': a large number for a person."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4f} {unit}"
    return f"{number:g}"
