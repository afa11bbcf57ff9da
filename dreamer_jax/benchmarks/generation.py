"""How fast models generate, next to each other and to Hugging Face's Qwen3-MoE: all sides in turn, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dreamer_jax.benchmarks import qwen3
from dreamer_jax.benchmarks.qwen3_generation import fastest_qwen3
from dreamer_jax.benchmarks.training import machine
from dreamer_jax.config.sections import Config
from dreamer_jax.families import build, initialise
from dreamer_jax.inference.engine import Engine
from dreamer_jax.inference.model import fold

Measurement = dict[str, Any]
Side = Callable[[np.ndarray, int], tuple[float, float]]
"""(prompts [B, S], tokens) -> seconds to the first token and to the last."""


def bench_generate(
    configs: Sequence[tuple[str, Config]],
    batches: Sequence[int],
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    against: bool,
    int8: bool,
    say: Callable[[str], None],
) -> Measurement:
    """Time greedy generation from random weights after random prompts.

    Args:
        configs: (name, configuration) of our models; with `against`, the first is the one the peer has the sizes of.
        batches: batch sizes.
        prompt_tokens, tokens: of each row, prompt and continuation.
        rounds: how often each side has its turn.
        int8: whether each of our models also has its turn with its experts' matrices in eight bits.
        say: gets a line of progress now and then.

    Returns:
        `machine`; `sides`: for each batch size and name see `_summary`; with `against` also `ratios`: for each batch
        size and name our speed over the peer's, median and range over the rounds.

    Raises:
        UserError: the comparison isn't possible.
    """
    if against:
        qwen3.check_comparable(configs[0][1])
        qwen3.require_transformers()
    ours = {name: _our_side(config) for name, config in configs}
    if int8:
        ours |= {f"{name}, int8": _our_side(config, int8) for name, config in configs}
    smallest = min(config.model.vocab_size for _, config in configs)
    result: Measurement = {"machine": machine(), "prompt_tokens": prompt_tokens, "tokens": tokens, "sides": {}}
    for batch in batches:
        prompts = np.random.default_rng(batch).integers(0, smallest, (batch, prompt_tokens), np.int64)
        sides: dict[str, Side] = dict(ours)
        if against:
            say(f"batch {batch}: choosing the experts' implementation of Qwen3-MoE ...")
            theirs, tried = fastest_qwen3(configs[0][1], prompts, tokens)
            say("seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in tried.items()))
            sides[f"Qwen3-MoE, {theirs.experts}"] = theirs
        for name in ours:
            began = time.perf_counter()
            sides[name](prompts, tokens)
            say(f"batch {batch}: {name} compiled and run in {time.perf_counter() - began:.1f} s")
        times = _in_turns(sides, prompts, tokens, rounds)
        result["sides"][str(batch)] = {name: _summary(batch, tokens, runs) for name, runs in times.items()}
        if against:
            reference = list(times.values())[-1]
            ratios = {name: _ratio(times[name], reference) for name in ours}
            result.setdefault("ratios", {})[str(batch)] = ratios
    return result


def _our_side(config: Config, int8: bool = False) -> Side:
    weights = initialise(build(config.model), jax.random.key(config.run.seed))
    engine = Engine(fold(config.model, *weights, int8=int8))

    def generate(prompts: np.ndarray, tokens: int) -> tuple[float, float]:
        began = time.perf_counter()
        first = 0.0
        for number, rows in enumerate(engine.stream(prompts.tolist(), tokens)):
            if number == 0:
                first = time.perf_counter() - began
            assert rows
        return first, time.perf_counter() - began

    return generate


def _in_turns(
    sides: dict[str, Side], prompts: np.ndarray, tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(seconds to the first token, to the last) of each side in each round; who goes first alternates."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            times[name].append(sides[name](prompts, tokens))
    return times


def _summary(batch: int, tokens: int, runs: list[tuple[float, float]]) -> Measurement:
    """Medians: tokens a second of the whole call (the prompt's time included) and seconds to the first token."""
    total = statistics.median(last for _, last in runs)
    return {
        "tokens_per_second": batch * tokens / total,
        "seconds_to_first_token": statistics.median(first for first, _ in runs),
        "seconds": total,
        "rounds": len(runs),
    }


def _ratio(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> Measurement:
    ratios = [b[1] / a[1] for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
