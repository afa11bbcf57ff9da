"""Section 3.8: make one model cost what another costs, by coordinate descent over its experts.

The expert size F is searched until the FLOPs per token are closest to the target, then the number of experts E
until the parameters are closest, and again, until nothing changes. The descent starts from the baseline's own
experts (all its layers' together when the model is recurrent), never from the model's, so that the
result doesn't depend on what happens to stand in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dreamer_jax.budget import analytic, memory
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.errors import UserError

Hold = Literal["both", "flops", "params"]


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
    """Budgets to meet, and the experts the descent starts from. None: not asked for; memory is never searched."""

    params: int | None
    flops_per_token: float | None
    num_experts: int
    expert_size: int
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Iteration:
    """One search of the descent: the experts it ended at and their gaps to the target, see `gaps`."""

    searched: Literal["expert_size", "num_experts"]
    num_experts: int
    expert_size: int
    gaps_percent: dict[str, float]


@dataclass(frozen=True)
class Match:
    """A matched model, its cost, and how the descent got there."""

    model: DreamerConfig
    cost: Cost
    target: Target
    iterations: tuple[Iteration, ...]

    @property
    def gaps_percent(self) -> dict[str, float]:
        """See `gaps`."""
        return gaps(self.cost, self.target)


def cost(model: DreamerConfig, context: int) -> Cost:
    """Cost of a model that generates `context` tokens (1024 in Table 1)."""
    return Cost(
        params=int(analytic.total(analytic.parameters(model))),
        flops_per_token=analytic.total(analytic.matmul_flops(model, analytic.average_context(context))),
        memory_bytes=sum(memory.generation(model, context).values()),
    )


def target_of(baseline: DreamerConfig, recurrent: bool, context: int) -> Target:
    """The cost of a baseline, and its experts as one layer (or, if not recurrent, each layer) would hold them."""
    experts = baseline.num_experts
    if recurrent and not baseline.recurrent:
        experts *= baseline.depth
    if baseline.recurrent and not recurrent:
        experts = max(baseline.experts_per_token, experts // baseline.depth)
    its = cost(baseline, context)
    return Target(its.params, its.flops_per_token, experts, baseline.expert_size, its.memory_bytes)


def match(model: DreamerConfig, target: Target, context: int, granularity: int = 8, hold: Hold = "both") -> Match:
    """The model with the E and F that come closest to the target.

    Args:
        model: everything but E and F is kept.
        target: budgets, and where to start. With one budget only, E (FLOPs) or F (parameters) is kept too.
        context: tokens of a generated sequence, for FLOPs and memory.
        granularity: F is a multiple of this.
        hold: flops moves only F and keeps the model's E, params only E and keeps its F, both moves both.

    Raises:
        UserError: a budget is below what the other parts of the model need alone.
    """
    flops = target.flops_per_token if hold != "params" else None
    params = target.params if hold != "flops" else None
    if flops is not None and params is not None:
        start = max(target.num_experts, model.experts_per_token)
        model = replace(model, num_experts=start, expert_size=_multiple(target.expert_size, granularity))
    _require_room(model, flops, params, context)
    iterations: list[Iteration] = []
    seen: list[DreamerConfig] = []
    while model not in seen:
        seen.append(model)
        if flops is not None:
            model = _search_expert_size(model, flops, context, granularity)
            iterations.append(_iteration("expert_size", model, target, context))
        if params is not None:
            model = _search_num_experts(model, params, context)
            iterations.append(_iteration("num_experts", model, target, context))
    # Usually the descent has ended at a fixed point; where it goes in a circle, its best point is taken.
    best = min(seen[seen.index(model) :], key=lambda each: sum(map(abs, gaps(cost(each, context), target).values())))
    return Match(best, cost(best, context), target, tuple(iterations))


def gaps(its: Cost, target: Target) -> dict[str, float]:
    """Quantity -> (ours / target - 1) in percent, of each quantity the target has."""
    budgets = {name: getattr(target, name) for name in ("params", "flops_per_token", "memory_bytes")}
    return {name: 100 * (getattr(its, name) / goal - 1) for name, goal in budgets.items() if goal is not None}


def _search_expert_size(model: DreamerConfig, budget: float, context: int, granularity: int) -> DreamerConfig:
    def flops(multiple: int) -> float:
        return cost(replace(model, expert_size=multiple * granularity), context).flops_per_token

    return replace(model, expert_size=granularity * _closest(flops, budget, smallest=1))


def _search_num_experts(model: DreamerConfig, budget: int, context: int) -> DreamerConfig:
    def params(experts: int) -> int:
        return cost(replace(model, num_experts=experts), context).params

    return replace(model, num_experts=_closest(params, budget, smallest=model.experts_per_token))


def _closest(quantity: Callable[[int], float], goal: float, smallest: int) -> int:
    """The integer from `smallest` on whose (growing) quantity is closest to the goal, by binary search."""
    low, high = smallest, 2 * smallest
    while quantity(high) < goal:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if quantity(middle) < goal else (low, middle)
    return min((low, high), key=lambda each: abs(quantity(each) - goal))


def _require_room(model: DreamerConfig, flops: float | None, params: int | None, context: int) -> None:
    """The parts that no search moves must leave something for the experts, with as few of them as there can be."""
    if params is not None:
        model = replace(model, num_experts=model.experts_per_token)
    needs = {
        "FLOPs per token": (analytic.matmul_flops(model, analytic.average_context(context)), flops),
        "parameters": (analytic.parameters(model), params),
    }
    for what, (parts, budget) in needs.items():
        others = {part: number for part, number in parts.items() if part != "EA"}
        needed = sum(others.values())
        if budget is None or needed < budget:
            continue
        largest = max(others, key=lambda part: others[part])
        raise UserError(
            f"the {what} of this {model.variant} can't be matched: without the experts its other parts take "
            f"{short(needed)}, {short(needed - budget)} more than the target of {short(budget)}; the largest is "
            f"{largest} with {short(others[largest])}. Use a smaller {_remedy(largest)}, or a larger target"
        )


def _remedy(part: str) -> str:
    keys = {
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "SA": "model.sa_heads or model.sa_head_size",
        "DA": "model.da_heads or model.da_head_size",
        "routers": "model.router_size",
    }
    return keys.get(part, "model.hidden_size")


def short(number: float) -> str:
    """1234567 -> '1.2346 M': a large number for a person."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4f} {unit}"
    return f"{number:g}"


def _multiple(size: int, granularity: int) -> int:
    return granularity * max(1, round(size / granularity))


def _iteration(
    searched: Literal["expert_size", "num_experts"], model: DreamerConfig, target: Target, context: int
) -> Iteration:
    return Iteration(searched, model.num_experts, model.expert_size, gaps(cost(model, context), target))
