"""`dreamer bench samplers RUN --data FILE`: how fast a trained model generates with every sampler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive, say
from dreamer_jax.cli.generate import prompt_file, read_prompts
from dreamer_jax.cli.inference_options import RUN


def run(arguments: list[str]) -> int:
    """Run the benchmark and print its numbers; returns the exit code."""
    options = _parser().parse_args(arguments)
    path = prompt_file(options.data)
    from dreamer_jax.benchmarks.samplers import bench_samplers  # after the checks: importing jax takes a second
    from dreamer_jax.inference import fold
    from dreamer_jax.model import load

    model = load(options.run)
    records = read_prompts(path, model.config.data.prompt)
    prompts = [model.encode(prompt) for _, prompt in records]
    folded = fold(model.config.model, model.params, model.model_state, options.depth)
    found = bench_samplers(folded, prompts, options.batch or [1, 8], options.tokens, options.rounds, say)
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench samplers",
        description="Generate greedily behind prompts with every sampler that the model can be used with, all in turn.",
        epilog="What the columns are: docs/samplers.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN)
    add("--data", metavar="JSONL", required=True, help="prompts, as of `dreamer generate --file`; the first ones count")
    add("--depth", type=positive, metavar="L", help="the full depth (as trained)")
    add("--batch", type=positive, action="append", metavar="B", help="rows at once; may be given several times (1, 8)")
    add("--tokens", type=positive, default=64, metavar="N", help="tokens to generate (64)")
    add("--rounds", type=positive, default=3, metavar="N", help="turns of each sampler (3)")
    add("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _text(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "devices"))
    lines = [f"{machine['devices']} x {machine['device']}; {versions}", f"{found['tokens']} generated tokens"]
    for batch, sides in found["batches"].items():
        lines.append(f"\n{'batch ' + batch:<36}{'tokens/s':>9}{'steps':>8}{'work':>8}{'accepted':>10}{'agreement':>11}")
        for name, its in sides.items():
            accepted = "" if its["acceptance"] is None else f"{its['acceptance']:.1%}"
            lines.append(
                f"{name:<36}{its['tokens_per_second']:>9,.0f}{its['steps']:>8.2f}{its['work']:>8.2f}"
                f"{accepted:>10}{its['agreement']:>11.1%}"
            )
    lines += [f"\n{reason}" for reason in found["refused"].values()]
    return "\n".join(lines)
