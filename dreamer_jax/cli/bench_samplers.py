"""`dreamer bench samplers RUN --data FILE`: how fast a trained model generates with every sampler, and how well."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamer_jax.cli.arguments import Parser, natural, positive, say
from dreamer_jax.cli.generate import prompt_file, read_prompts
from dreamer_jax.cli.inference_options import CACHE, RUN, add_sampling, prompt_template, sampling_of
from dreamer_jax.cli.sampler_grid import add_grid, read_grids
from dreamer_jax.errors import UserError

if TYPE_CHECKING:
    from dreamer_jax.benchmarks.sampler_questions import Questions
    from dreamer_jax.config import Config

TOKENS = 64
"""Of a text, where nothing says otherwise."""


def run(arguments: list[str]) -> int:
    """Run the benchmark, print its numbers, and write what is asked for; returns the exit code."""
    options = _parser().parse_args(arguments)
    _check_places(options)
    # After the checks that need no jax: importing it takes a second.
    from dreamer_jax.benchmarks.samplers import Setting, Task, bench_samplers, settings_for
    from dreamer_jax.inference import Static, fold
    from dreamer_jax.model import load

    grids = read_grids(options.vary, options.depths)
    sampling, batches = sampling_of(options), options.batch or [1, 8]
    model = load(options.run, cache=options.cache)
    questions = _questions(options, model.config).first(options.limit or max(batches))
    tokens = options.tokens or questions.max_tokens or TOKENS
    folded = fold(model.config.model, model.params, model.model_state, options.depth)
    settings = [Setting(Static()), *(setting for grid in grids for _, _, setting in grid.points)]
    if not grids:
        settings = list(settings_for(folded.total_depth))
    task = Task(questions, batches, tokens, options.rounds, sampling)
    found = bench_samplers(folded, model.tokenizer, settings, task, say)
    found["grids"] = {
        grid.name: [{"value": value, "others": others, "label": its.label} for value, others, its in grid.points]
        for grid in grids
    }
    print(_text(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.figure:
        from dreamer_jax.benchmarks.sampler_figures import draw

        for path in draw(found, Path(options.figure)):
            print(f"figure {path}")
    return 0


def _check_places(options: argparse.Namespace) -> None:
    """Whatever can't be read or written shows before anything is measured."""
    if options.task is None:
        prompt_file(options.data)
    if options.figure and not (options.vary or options.depths):
        raise UserError("--figure draws a setting over its values; name one with --vary or --depths")
    if options.json and Path(options.json).is_dir():
        raise UserError(f"--json {options.json}: is a folder; name a file")
    for path in (options.json and Path(options.json).parent, options.figure and Path(options.figure)):
        try:
            if path:
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"can't write to {path}: {error}") from None


def _questions(options: argparse.Namespace, config: Config) -> Questions:
    """What `--data` holds."""
    from dreamer_jax.benchmarks.sampler_questions import of_records, of_task
    from dreamer_jax.evaluation.opening import space_in_prompt

    if options.task is None:
        return of_records(read_prompts(Path(options.data), prompt_template(config)), options.stop)
    return of_task(options.task, options.data, options.shots, space_in_prompt(config))


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench samplers",
        description="Generate behind prompts with every sampler that the model can be used with, or with the settings "
        "that --vary and --depths name, all in turn and next to full depth.",
        epilog="What is measured how: docs/samplers.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN)
    add(
        "--data",
        metavar="PATH",
        required=True,
        help="JSONL of prompts, as of `dreamer generate --file`; where records have prompt and answer, a text is right "
        "if it is that answer. With --task the folder of the benchmarks, as of `dreamer eval`",
    )
    add("--task", metavar="NAME", help="a benchmark of `dreamer eval` that is answered in texts: gsm8k, math")
    add("--shots", type=natural, default=0, metavar="N", help="examples before each question of --task (0)")
    add("--limit", type=positive, metavar="N", help="take the first N prompts (the largest batch)")
    add_grid(parser)
    add("--depth", type=positive, metavar="L", help="the full depth (as trained)")
    add("--cache", metavar="RULE", help=CACHE)
    add("--batch", type=positive, action="append", metavar="B", help="rows at once; may be given several times (1, 8)")
    add("--tokens", type=positive, metavar="N", help=f"most tokens of a text (that of --task, or {TOKENS})")
    add("--rounds", type=positive, default=3, metavar="N", help="turns of each setting over all prompts (3)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be given several times")
    add_sampling(parser)
    add("--json", metavar="FILE", help="write the numbers there")
    add("--figure", metavar="FOLDER", help="draw speed against accuracy there, a figure for each --vary and --depths")
    return parser


def _text(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "devices"))
    drawn = found["sampling"] or "greedy"
    lines = [f"{machine['devices']} x {machine['device']}; {versions}"]
    lines.append(
        f"{found['questions']} prompt{'s' * (found['questions'] > 1)}, up to {found['tokens']} tokens each, {drawn}"
    )
    for batch, sides in found["batches"].items():
        metrics = list(next(iter(sides.values()))["accuracy"])
        width = 2 + max(map(len, sides))
        head = f"\n{'batch ' + batch:<{width}}{'tokens/s':>9}{'speed-up':>10}{'steps':>8}{'work':>8}{'accepted':>10}"
        lines.append(f"{head}{'agreement':>11}" + "".join(f"{metric:>18}" for metric in metrics))
        lines += [_row(name, width, its) for name, its in sides.items()]
    lines += [f"\n{name}: {reason}" for name, reason in found["refused"].items()]
    return "\n".join(lines)


def _row(name: str, width: int, its: Mapping[str, Any]) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    speedup = shown(its["speedup"], ".2f") + "x" * (its["speedup"] is not None)
    row = f"{name:<{width}}{shown(its['tokens_per_second'], ',.0f'):>9}{speedup:>10}"
    row += "".join(f"{shown(its[key], '.2f'):>8}" for key in ("steps", "work"))
    accepted = "" if its["acceptance"] is None else f"{its['acceptance']:.1%}"
    shares = [f"{accepted:>10}{its['agreement']:>11.1%}"]
    for accuracy in its["accuracy"].values():
        error = "" if accuracy["error"] is None else f" +- {accuracy['error']:.1%}"
        shares.append(f"{accuracy['value']:.1%}{error}".rjust(18))
    return row + "".join(shares)
