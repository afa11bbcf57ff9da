"""A trained model with each sampler: speed, steps that follow one another, and how far its texts are the same."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dreamer_jax.benchmarks.training import machine
from dreamer_jax.errors import UserError
from dreamer_jax.inference import (
    Adaptive,
    DiffusionForcing,
    Engine,
    FoldedModel,
    Generated,
    Lossless,
    Sampler,
    Speculative,
    Static,
)
from dreamer_jax.inference.samplers.criteria import CRITERIA

Measurement = dict[str, Any]


def settings_for(depth: int) -> Iterator[tuple[Sampler, int]]:
    """(sampler, depths) that are compared for a model of L = `depth`: full depth first, then fewer, then each sampler
    at several settings."""
    parts = sorted({max(1, depth // share) for share in (8, 4, 2)} - {depth})
    for part in (depth, *parts):
        yield Static(), part
    for name in CRITERIA:
        yield Adaptive(name), depth
    for part in parts:
        yield Speculative(4, part), depth
    for part in parts:
        yield Lossless(part), depth
    for part in parts:
        yield DiffusionForcing(part), depth
        yield DiffusionForcing(part, exit="fixed"), depth


def bench_samplers(
    model: FoldedModel,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> Measurement:
    """Generate greedily behind prompts with every sampler that the model can be used with, all in turn.

    Args:
        model: see `fold`; its depth is the full one.
        prompts: token ids; a batch takes the first ones.
        batches: batch sizes.
        tokens: of each text; nothing ends it earlier.
        rounds: how often each has its turn.
        say: gets a line of progress now and then.

    Returns:
        `machine`, `tokens`; `refused`: name -> reason; `batches`: for each batch size and label see `_summary`.

    Raises:
        UserError: a batch is larger than the number of prompts.
    """
    if max(batches) > len(prompts):
        raise UserError(f"{len(prompts)} prompts are too few for a batch of {max(batches)}")
    engines: dict[str, Engine] = {}
    refused: dict[str, str] = {}
    for sampler, depth in settings_for(model.total_depth):
        try:
            at = dataclasses.replace(model, total_depth=model.family.check_depth(depth))
            engines[_label(sampler, depth, model.total_depth)] = Engine(at, sampler)
        except UserError as error:
            refused[sampler.name] = str(error)
    result: Measurement = {"machine": machine(), "tokens": tokens, "refused": refused, "batches": {}}
    for batch in batches:
        chosen = prompts[:batch]
        for name, engine in engines.items():
            _generate(engine, chosen, tokens)  # compiled here
            say(f"batch {batch}: {name} compiled")
        runs = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                runs[name].append(_generate(engine, chosen, tokens))
        full = next(iter(runs.values()))[0][1]
        result["batches"][str(batch)] = {name: _summary(its, full) for name, its in runs.items()}
    return result


def _label(sampler: Sampler, depth: int, full: int) -> str:
    changed = sampler.label if sampler != Static() else "static"
    return changed if depth == full else f"{changed}, depth {depth}"


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[Generated]]:
    """Seconds for the tokens after the first of every row, which comes of the prompt, and the rows."""
    stream = engine.stream(prompts, tokens)
    next(stream)
    began = time.perf_counter()
    *_, rows = stream
    return time.perf_counter() - began, rows


def _summary(runs: Sequence[tuple[float, list[Generated]]], full: list[Generated]) -> Measurement:
    """Of one sampler, per token after a row's first: `tokens_per_second`, the median over the rounds; `steps` that
    follow one another; `work`, depth steps of all positions. `acceptance` of drafted tokens, None without;
    `agreement`, the share of the texts before the first token that isn't that of full depth."""
    rows = runs[0][1]
    count = sum(len(row.tokens) - 1 for row in rows)
    drafted = sum(row.drafted for row in rows)
    same = [_common(row.tokens, its.tokens) / len(its.tokens) for row, its in zip(rows, full, strict=True)]
    return {
        "tokens_per_second": count / statistics.median(seconds for seconds, _ in runs),
        "steps": sum(row.steps for row in rows) / count,
        "work": sum(row.work for row in rows) / count,
        "acceptance": sum(row.accepted for row in rows) / drafted if drafted else None,
        "agreement": statistics.mean(same),
    }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (one, two) in enumerate(zip(a, b, strict=True)) if one != two), len(a))
