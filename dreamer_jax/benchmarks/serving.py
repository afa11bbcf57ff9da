"""Load on a served engine: requests arrive at a rate, whether the ones before are finished or not.

An open loop, as of many people who know nothing of each other. (Clients that wait for their answer before they ask
again slow down with the server, which hides how long requests wait.) Gaps between arrivals are exponential, so the
arrivals are a Poisson process.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers import Sampler, Static, one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress
from dreamer_jax.serving.contract import Closed, QueueFull, Request, ServingEngine, TooLong, Update

MODES = ("depth batching", "slowest row", "full depth")
"""Rows at depths of their own; rows that wait for the deepest one at each token; all tokens through all depths."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Replayed(Sampler):
    """Tokens stop at recorded depths, so that engines are compared on the same work. The token at position p goes
    through `depths[p % n]` of them, and through L where that is less."""

    name: ClassVar[str] = "replayed"
    early: ClassVar[bool] = True

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
        return one_by_one.decode(choosing, model, progress, slots, carried, asked, self._rule())


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
    """

    arrived: float
    brought: list[tuple[float, int]] = field(default_factory=list)
    depths: int = 0
    finish: str = ""

    @property
    def tokens(self) -> int:
        """That came."""
        return sum(count for _, count in self.brought)


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
) -> tuple[list[Timeline], float]:
    """Hand requests of random tokens to an engine as they arrive; (what became of them, seconds until the last ended).

    Args:
        engine: that is ready.
        plan: when they come, and how long they are.
        sampler: of all.
        vocabulary: of the model.
        seed: of the tokens.
    """
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, vocabulary, each.lengths.prompt).tolist()) for each in plan]
    lines = [Timeline(each.seconds) for each in plan]
    left, ended = threading.Semaphore(0), 0
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
        time.sleep(max(0.0, begin + each.seconds - time.perf_counter()))
        try:
            engine.submit(Request(prompt, each.lengths.answer, sampler=sampler), deliver_to(line))
        except (QueueFull, TooLong, Closed) as error:
            line.finish = f"refused: {type(error).__name__}"
            ended += 1
    for _ in range(len(plan) - ended):
        left.acquire()
    return lines, time.perf_counter() - begin


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


def bound(outside: float, inside: float, depth: int, mean_depth: float) -> float:
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
    costs: tuple[float, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The same load on an engine in each of the modes, one after the other.

    Args:
        engine_for: makes the engine of a mode; it is closed here.
        plan, vocabulary, seed: as of `drive`.
        sampler: how tokens go through the depths, but at full depth.
        costs: F0 and Fr, see `bound`.
        say: gets a line of progress now and then.

    Returns:
        `modes`: the `summary` of each; `bound` of the depths that tokens took; `speedup` of throughput over full depth.
    """
    modes: dict[str, Any] = {}
    depth = 0
    for mode in MODES:
        engine = engine_for(mode)
        began = time.perf_counter()
        while not engine.ready:
            time.sleep(0.01)
        say(f"{mode}: ready after {time.perf_counter() - began:.1f} s")
        try:
            lines, seconds = drive(engine, plan, Static() if mode == "full depth" else sampler, vocabulary, seed)
            seen = engine.view()
        finally:
            engine.close(0)
        modes[mode] = summary(lines, seconds, seen.share_of_bound)
        depth = seen.depth
    full, batched = modes["full depth"], modes["depth batching"]
    mean = batched["mean_depth"]
    return {
        "modes": modes,
        "depth": depth,
        "bound": None if mean is None else bound(*costs, depth, mean),
        "speedup": {
            mode: found["tokens_per_second"] / full["tokens_per_second"] if full["tokens"] else math.nan
            for mode, found in modes.items()
        },
    }
