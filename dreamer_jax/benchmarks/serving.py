"""Load on a served engine: requests arrive at a rate, whether the ones before are finished or not.

An open loop, as of many people who know nothing of each other. (Clients that wait for their answer before they ask
again slow down with the server, which hides how long requests wait.) Gaps between arrivals are exponential, so the
arrivals are a Poisson process.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers import Sampler, Static, one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress
from dreamer_jax.serving.contract import Closed, QueueFull, Request, ServingEngine, TooLong, Update, View

MODES = ("depth batching", "slowest row", "full depth")
"""Rows at depths of their own; rows that wait for the deepest one at each token; all tokens through all depths."""
PERCENTILES = (50, 90, 99)
LOOK = 0.05
"""Seconds between two looks at an engine."""


@dataclass(frozen=True)
class Replayed(Sampler):
    """Tokens stop at recorded depths, so that engines are compared on the same work. The token at position p goes
    through `depths[p % n]` of them, and through L where that is less."""

    name: ClassVar[str] = "replayed"
    early: ClassVar[bool] = True
    rows_apart: ClassVar[bool] = True

    depths: tuple[int, ...] = (1,)
    """The record."""

    def _rule(self) -> one_by_one.Rule:
        recorded = jnp.asarray(self.depths, jnp.int32)

        def start(model, flight):
            return jnp.zeros(model.family.stream(flight.state).shape[0], jnp.int32)

        def check(model, flight, positions, slots, before):
            return before + 1 >= recorded[positions[:, 0] % len(self.depths)], before + 1

        return one_by_one.Rule(start, check)

    def carry(self, model, rows: int) -> Carried:
        """Nothing is on its way."""
        return one_by_one.carry(model, rows, self._rule())

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """One token after another."""
        return one_by_one.decode(choosing, model, progress, slots, carried, asked, lambda settings: self._rule())


class Lengths(NamedTuple):
    """Tokens of a request."""

    prompt: int
    answer: int


class Arrival(NamedTuple):
    """A request that is to come, so many seconds after the first moment."""

    seconds: float
    lengths: Lengths


@dataclass
class Timeline:
    """What became of a request, in seconds since the first moment.

    Attributes:
        arrived: when it was to come.
        brought: when tokens came, and how many each time.
        depths: of all of them, added up; where it is known.
        finish: how it ended: as of `contract.Finish`, or "refused".
        counted: tokens as its server counted them at the end, where it is one that does.
    """

    arrived: float
    brought: list[tuple[float, int]] = field(default_factory=list)
    depths: int = 0
    finish: str = ""
    counted: int | None = None

    @property
    def tokens(self) -> int:
        """That came."""
        return sum(count for _, count in self.brought) if self.counted is None else self.counted


def read_lengths(path: Path) -> tuple[list[Lengths], tuple[int, ...]]:
    """(lengths, recorded depths) of a JSONL file: `prompt_tokens` and `answer_tokens` of each line; where lines have
    `depths`, of one token after the other, all of them in a row.

    Raises:
        UserError: it can't be read.
    """
    found, depths = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            lengths, recorded = Lengths(record["prompt_tokens"], record["answer_tokens"]), record.get("depths", [])
            if not all(type(n) is int and n >= 1 for n in (*lengths, *recorded)):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{path}: line {number}: a line is JSON with prompt_tokens, answer_tokens, and perhaps a list depths; "
                "all of them are integers of 1 or more"
            ) from None
        found.append(lengths)
        depths += recorded
    if not found:
        raise UserError(f"{path}: holds no line")
    return found, tuple(depths)


def uniform(prompt: tuple[int, int], answer: tuple[int, int], count: int, seed: int) -> list[Lengths]:
    """So many lengths, each evenly between its bounds."""
    rng = np.random.default_rng(seed)
    sides = [rng.integers(low, high, count, endpoint=True).tolist() for low, high in (prompt, answer)]
    return [Lengths(*each) for each in zip(*sides, strict=True)]


def arrivals(lengths: Sequence[Lengths], count: int, rate: float, seed: int) -> list[Arrival]:
    """A Poisson process; the lengths are taken in turn. At an infinite rate all come at once.

    Args:
        lengths: at least one.
        count: requests.
        rate: of them a second.
        seed: of the gaps.
    """
    gaps = np.random.default_rng(seed).exponential(1.0, count) / rate
    times = np.cumsum(gaps) - gaps[0]
    return [Arrival(float(when), lengths[i % len(lengths)]) for i, when in enumerate(times)]


def drive(
    engine: ServingEngine, plan: Sequence[Arrival], sampler: Sampler, vocabulary: int, seed: int
) -> tuple[list[Timeline], float, list[tuple[float, View]]]:
    """Hand requests of random tokens to an engine as they arrive.

    Args:
        engine: that is ready.
        plan: when they come, and how long they are.
        sampler: of all.
        vocabulary: of the model.
        seed: of the tokens.

    Returns:
        What became of them, seconds until the last ended, and how the engine looked in between, at seconds since the
        first moment.
    """
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, vocabulary, each.lengths.prompt).tolist()) for each in plan]
    lines = [Timeline(each.seconds) for each in plan]
    left, ended, looks = threading.Semaphore(0), 0, []
    begin = time.perf_counter()

    def deliver_to(line: Timeline) -> Callable[[Update], None]:
        def deliver(update: Update) -> None:
            if update.tokens:
                line.brought.append((time.perf_counter() - begin, len(update.tokens)))
                line.depths += sum(token.depth for token in update.tokens)
            if update.finish is not None:
                line.finish = update.finish
                left.release()

        return deliver

    for each, prompt, line in zip(plan, prompts, lines, strict=True):
        while (early := begin + each.seconds - time.perf_counter()) > 0:
            looks.append((time.perf_counter() - begin, engine.view()))
            time.sleep(min(early, LOOK))
        try:
            engine.submit(Request(prompt, each.lengths.answer, sampler=sampler), deliver_to(line))
        except (QueueFull, TooLong, Closed) as error:
            line.finish = f"refused: {type(error).__name__}"
            ended += 1
    while ended < len(plan):
        looks.append((time.perf_counter() - begin, engine.view()))
        ended += left.acquire(timeout=LOOK)
    return lines, time.perf_counter() - begin, looks


def steady(
    looks: Sequence[tuple[float, View]], costs: Mapping[str, tuple[float, float]]
) -> dict[str, float | None] | None:
    """What an engine does while requests wait and no place is free, without the time when it fills and when it runs
    empty: in the longest such time, as the queue may run empty between arrivals. None if there was none.

    Args:
        looks: of `drive`.
        costs: see `bench_serving`.

    Returns:
        Tokens a second, of all the time and of that which wasn't spent on prompts; mean depth; places in steps and
        outside of the depths that a token took; and what it would have cost if all places were used, over what it did
        cost, in FLOPs.
    """
    stretches = [list(its) for waits, its in itertools.groupby(looks, lambda look: look[1].queue > 0) if waits]
    longest = max(stretches, key=lambda its: its[-1][0] - its[0][0], default=[])
    full = [look for look in longest if None not in look[1].rows]
    if not full or full[0][1].decoded == full[-1][1].decoded:
        return None
    (begin, a), (end, b) = full[0], full[-1]
    decoded, seconds = b.decoded - a.decoded, b.decode_seconds - a.decode_seconds
    mean, steps = ((getattr(b, name) - getattr(a, name)) / decoded for name in ("decoded_depths", "row_steps"))
    borders = (b.border_rows - a.border_rows) / decoded

    def cost(unit: str, outside: float, depths: float) -> float:
        return outside * costs[unit][0] + depths * costs[unit][1]

    return {
        "seconds": end - begin,
        "tokens_per_second": (b.tokens - a.tokens) / (end - begin),
        "decoded_per_second": decoded / seconds,
        "mean_depth": mean,
        "steps_a_token": steps,
        "borders_a_token": borders,
        "share_of_bound": cost("flops", 1, mean) / cost("flops", borders, steps),
    }


def summary(lines: Sequence[Timeline], seconds: float, share_of_bound: float | None) -> dict[str, Any]:
    """What was measured. Times are milliseconds; the first token counts from the request's arrival, whether or not the
    engine had room. Of n tokens that come together d after those before, each counts as d / n."""
    first = [line.brought[0][0] - line.arrived for line in lines if line.brought]
    between = [
        gap / count
        for line in lines
        for (before, _), (after, count) in zip(line.brought, line.brought[1:], strict=False)
        for gap in [after - before]
        for _ in range(count)
    ]
    tokens = sum(line.tokens for line in lines)
    depths = sum(line.depths for line in lines)
    finished = [line.finish for line in lines]
    return {
        "requests": len(lines),
        "finished": {kind: finished.count(kind) for kind in sorted(set(finished))},
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mean_depth": depths / tokens if tokens and depths else None,
        "first_token_ms": _percentiles(first),
        "between_tokens_ms": _percentiles(between),
        "share_of_bound": share_of_bound,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """By linear interpolation; None of nothing."""
    if not seconds:
        return None
    found = np.percentile(np.asarray(seconds), PERCENTILES) * 1000
    return {str(percent): float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def bound(outside: float, inside: float, depth: float, mean_depth: float) -> float:
    """The speed-up over full depth that exit depths allow: (F0 + r_max Fr) / (F0 + mean depth Fr), of arXiv 2608.09444.

    Args:
        outside, inside: F0 and Fr, the cost of a token outside of the depths, and in one of them.
        depth: r_max.
        mean_depth: of the tokens.
    """
    return (outside + depth * inside) / (outside + mean_depth * inside)


def bench_serving(
    engine_for: Callable[[str], ServingEngine],
    plan: Sequence[Arrival],
    sampler: Sampler,
    vocabulary: int,
    seed: int,
    costs: Mapping[str, tuple[float, float]],
    say: Callable[[str], None],
    names: Sequence[str] = MODES,
) -> dict[str, Any]:
    """The same load on an engine in each of the modes, one after the other.

    Args:
        engine_for: makes the engine of a mode; it is closed here.
        plan, vocabulary, seed: as of `drive`.
        sampler: how tokens go through the depths, but at full depth.
        costs: F0 and Fr, see `bound`; by what they are counted in, "flops" and perhaps "seconds".
        say: gets a line of progress now and then.
        names: of the modes; tokens of a model that halts by itself have no full depth.

    Returns:
        `modes`: the `summary` of each, with `steady`; `allowed`: the `bound` of the depths that tokens took over full
        depth, and the same over rows that wait for the slowest, by what costs are counted in; `speedup` of throughput
        over both, of all the time and of the steady one without prompts; `by_the_clock`: the latter over what is
        allowed, with costs in FLOPs.
    """
    modes: dict[str, Any] = {}
    depth = 0
    for mode in names:
        engine = engine_for(mode)
        began = time.perf_counter()
        while not engine.ready:
            if engine.failed:
                raise UserError(f"{mode}: the engine has failed; the log above has why")
            time.sleep(0.01)
        say(f"{mode}: ready after {time.perf_counter() - began:.1f} s")
        try:
            lines, seconds, looks = drive(engine, plan, Static() if mode == "full depth" else sampler, vocabulary, seed)
            seen = engine.view()
        finally:
            engine.close(0)
        modes[mode] = summary(lines, seconds, seen.share_of_bound) | {"steady": steady(looks, costs)}
        depth = seen.depth
    whole = speedups({mode: found["tokens_per_second"] for mode, found in modes.items()})
    rates = {mode: found["steady"] and found["steady"]["decoded_per_second"] for mode, found in modes.items()}
    limits, decoding = {unit: allowed(modes, its, depth) for unit, its in costs.items()}, speedups(rates)
    return {
        "modes": modes,
        "depth": depth,
        "costs": {unit: dict(zip(("outside", "depth"), its, strict=True)) for unit, its in costs.items()},
        "allowed": limits,
        "speedup": {"whole": whole, "decoding": decoding},
        "by_the_clock": shares(decoding, limits["flops"]),
    }


def allowed(modes: Mapping[str, Any], costs: tuple[float, float], depth: int) -> dict[str, float | None]:
    """The speed-up of depth batching over each of the other modes that the depths of the tokens allow. Rows that wait
    for the slowest take as many steps a token as they were seen to take."""
    batched, waiting = modes["depth batching"], modes["slowest row"]["steady"]
    mean = (batched["steady"] or batched)["mean_depth"]
    found = {
        "slowest row": None if mean is None or waiting is None else bound(*costs, waiting["steps_a_token"], mean),
        "full depth": None if mean is None else bound(*costs, depth, mean),
    }
    return {mode: its for mode, its in found.items() if mode in modes}


def speedups(rates: Mapping[str, float | None]) -> dict[str, float | None]:
    """Of depth batching over each of the other modes."""
    best = rates["depth batching"]
    return {mode: best / rate if best and rate else None for mode, rate in rates.items() if mode != "depth batching"}


def shares(reached: Mapping[str, float | None], limits: Mapping[str, float | None]) -> dict[str, float | None]:
    """Of the speed-ups that are allowed, over each of the other modes."""
    return {mode: times / limit if times and (limit := limits[mode]) else None for mode, times in reached.items()}
