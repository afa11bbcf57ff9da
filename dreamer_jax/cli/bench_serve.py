"""`dreamer bench serve RUN | --url URL`: a served engine under load."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamer_jax.cli.arguments import Parser, natural, positive, say
from dreamer_jax.cli.inference_options import RUN
from dreamer_jax.cli.sampler_options import add_sampler, parse
from dreamer_jax.errors import UserError

if TYPE_CHECKING:
    from dreamer_jax.benchmarks.serving import Arrival, Lengths
    from dreamer_jax.inference import Sampler
    from dreamer_jax.model import Model
    from dreamer_jax.serving.contract import ServingEngine

_STEADY = (
    "  while requests wait: {tokens_per_second:,.1f} tokens/s, prompts apart {decoded_per_second:,.1f}; "
    "share of the bound, by steps: {share_of_bound:.3f}"
)
ROWS = 16
SLOWEST = 0.001
"""Requests a second."""
KEY = "OPENAI_API_KEY"
"""The environment variable with the key of a server."""


def run(arguments: list[str]) -> int:
    """Measure and print; returns the exit code."""
    options, sampler = parse(_parser(), arguments)
    if sampler is None:
        return 0
    if (options.run is None) == (options.url is None):
        raise UserError("bench serve: name a RUN, or a server with --url URL")
    if options.url and options.rows is not None:
        raise UserError("--rows goes with RUN; a server has as many as `dreamer serve --rows` gave it")
    from dreamer_jax.benchmarks.serving import arrivals

    lengths, depths = _lengths(options)
    if options.url and depths:
        raise UserError(f"--lengths {options.lengths}: recorded depths are replayed with RUN only; leave them out")
    plan = arrivals(lengths, options.requests, options.rate, options.seed)
    found = _remote(options, sampler, plan) if options.url else _in_process(options, sampler, depths, plan)
    print(json.dumps(found, indent=2) if options.json else text(found))
    return 0


def _lengths(options: argparse.Namespace) -> tuple[list[Lengths], tuple[int, ...]]:
    from dreamer_jax.benchmarks.serving import read_lengths, uniform

    if options.lengths is not None:
        return read_lengths(Path(options.lengths))
    return uniform(options.prompt_tokens, options.answer_tokens, options.requests, options.seed), ()


def _remote(options: argparse.Namespace, sampler: Sampler, plan: list[Arrival]) -> dict[str, Any]:
    from dreamer_jax.benchmarks.serving_http import Remote, bench_remote

    remote = Remote(options.url, os.environ.get(KEY))
    asked = {"sampler": {"name": sampler.name, **dataclasses.asdict(sampler)}}
    extra = {} if sampler.name == "static" else asked
    return {"modes": {"as served": bench_remote(remote, plan, extra, options.seed)}}


def _in_process(
    options: argparse.Namespace, sampler: Sampler, depths: tuple[int, ...], plan: list[Arrival]
) -> dict[str, Any]:
    from dreamer_jax.benchmarks.serving import MODES, Replayed, bench_serving
    from dreamer_jax.benchmarks.step_costs import step_costs
    from dreamer_jax.budget.analytic import average_context, flops_by_depth
    from dreamer_jax.model import load
    from dreamer_jax.serving.groups import programs_of

    model = load(options.run)
    own = Replayed(depths) if depths else sampler
    programs_of(model.folded(), [own])  # what isn't served is refused before anything is measured
    context = max(each.lengths.prompt + each.lengths.answer for each in plan)
    rows = options.rows or ROWS
    costs = {
        "flops": flops_by_depth(model.family, average_context(context)),
        "seconds": step_costs(model.folded(), rows, context),
    }
    vocabulary = model.config.model.vocab_size

    def engine(mode: str) -> ServingEngine:
        return engine_for(mode, model, own, rows, context, options.requests)

    names = MODES
    if model.family.flags.halts:
        names = MODES[:2]
        say("full depth: left out, as tokens of this model stop by the rule it was trained with")
    return bench_serving(engine, plan, own, vocabulary, options.seed, costs, say, names)


def engine_for(mode: str, model: Model, sampler: Sampler, rows: int, context: int, queue: int) -> ServingEngine:
    """The engine of a mode.

    Args:
        mode: of `benchmarks.serving.MODES`; in "slowest row" the rows wait for each other at every token.
        model: a trained one.
        sampler: beside static, what requests ask for.
        rows, context, queue: as of `dreamer serve`.
    """
    from dreamer_jax.inference.samplers import Static
    from dreamer_jax.serving.engine import ServedEngine
    from dreamer_jax.serving.options import Options

    sizes = Options(rows=rows, context=context, queue=queue, logprobs=0)
    options = sizes if mode == "depth batching" else dataclasses.replace(sizes, places=rows, collect=1.0)
    return ServedEngine(model.folded(), [Static() if mode == "full depth" else sampler], options, say)


def text(found: Mapping[str, Any]) -> str:
    """What was measured, as lines."""
    lines = []
    for mode, its in found["modes"].items():
        ends = ", ".join(f"{count} {kind}" for kind, count in its["finished"].items())
        lines.append(f"{mode}: {its['requests']} requests in {its['seconds']:.1f} s ({ends})")
        mean = "" if its["mean_depth"] is None else f"; mean depth {its['mean_depth']:.2f}"
        lines.append(f"  {its['tokens_per_second']:,.1f} tokens/s{mean}")
        if its.get("steady") is not None:
            lines.append(_STEADY.format(**its["steady"]))
        for name, key in (("first token", "first_token_ms"), ("between tokens", "between_tokens_ms")):
            if its[key] is not None:
                lines.append(f"  {name}: " + ", ".join(f"{p} % within {ms:,.1f} ms" for p, ms in its[key].items()))
        if its["share_of_bound"] is not None:
            since = "" if "speedup" in found else ", since the server's start"
            lines.append(f"  share of the bound{since}: {its['share_of_bound']:.3f}")
    for unit, its in found.get("allowed", {}).items():
        lines.append(f"speed-up that the exit depths allow, F0 and Fr in {unit}: over {_over(its)}")
    for part, name in (("whole", "reached"), ("decoding", "reached while requests wait, prompts apart")):
        if "speedup" in found:
            lines.append(f"{name}: over {_over(found['speedup'][part])}")
    if "by_the_clock" in found:
        lines.append(f"share of the bound by the clock, while requests wait: over {_over(found['by_the_clock'])}")
    return "\n".join(lines)


def _over(speedups: Mapping[str, float | None]) -> str:
    return ", ".join(f"{mode} {'-' if times is None else f'{times:.2f}'}" for mode, times in speedups.items())


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench serve",
        description="Requests of random tokens arrive at a rate (a Poisson process), whether those before have ended "
        "or not. With RUN an engine in this process is measured three times: rows at depths of their own, rows that "
        f"wait for the deepest, and full depth. With --url a server is; its key is read from {KEY}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", nargs="?", help=RUN)
    add("--url", metavar="URL", help="a server of OpenAI's API, such as http://127.0.0.1:8000")
    add("--requests", type=positive, default=64, metavar="N", help="how many come (64)")
    add("--rate", type=_rate, default=math.inf, metavar="R", help="so many a second (all at once)")
    add("--lengths", metavar="JSONL", help="prompt_tokens and answer_tokens of each line, taken in turn; with RUN, "
        "recorded exit depths in a list depths are replayed")  # fmt: skip
    add("--prompt-tokens", type=_bounds, default=(16, 64), metavar="A-B", help="without --lengths: evenly (16-64)")
    add("--answer-tokens", type=_bounds, default=(16, 64), metavar="A-B", help="without --lengths: evenly (16-64)")
    add("--rows", type=positive, metavar="N", help=f"with RUN: requests that a step computes ({ROWS})")
    add("--seed", type=natural, default=0, help="of arrivals, lengths and tokens (0)")
    add("--json", action="store_true", help="print the numbers as JSON")
    add_sampler(parser)
    return parser


def _rate(written: str) -> float:
    try:
        rate = float(written)
    except ValueError:
        rate = math.nan
    if not rate >= SLOWEST:  # the next one would never come
        raise argparse.ArgumentTypeError(
            f"'{written}' is not a number of requests a second, {SLOWEST} or more; inf is all at once"
        )
    return rate


def _bounds(written: str) -> tuple[int, int]:
    low, two, high = written.partition("-")
    try:
        found = (positive(low), positive(high if two else low))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{written}' is neither a number of 1 or more nor two as in 16-64") from None
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"'{written}': the first must not be more than the second")
    return found
