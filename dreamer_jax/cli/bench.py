"""`dreamer bench train --config CONFIG`: how fast a train step is, alone or next to Hugging Face's Qwen3-MoE."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.cli import (
    bench_checkpoint,
    bench_data,
    bench_export,
    bench_generate,
    bench_kernels,
    bench_samplers,
    bench_serve,
)
from dreamer_jax.cli.arguments import Parser, positive, say, split_overrides
from dreamer_jax.config import load_config
from dreamer_jax.errors import UserError

USAGE = """\
usage: dreamer bench train --config CONFIG [--against transformers] [--steps N] [--profile DIR] [--json]
                           [--section.key value ...]
       dreamer bench data [--tokenizer SPEC] [--mixture FILE] [--megabytes N] [--workers N] [--json]
       dreamer bench export --config CONFIG [--peer CONFIG] [--dtype TYPE] [--json]
       dreamer bench generate --config CONFIG [--config ...] [--against transformers] [--batch B] [--json]
       dreamer bench checkpoint --config CONFIG [--steps N] [--pairs N] [--json]
       dreamer bench samplers RUN --data FILE [--vary KEY=VALUES] [--depths L,L] [--figure FOLDER] [--json FILE]
       dreamer bench serve RUN|--url URL [--rate R] [--requests N] [--lengths FILE] [--json]
       dreamer bench kernels [--topology v5p:2x2x1] [--match TEXT] [--json]

checkpoint  time that saving takes from training, and memory that restoring takes
data   tokens a second of preparing and feeding training data, and the memory that takes
export  prefill and decoding of the exported PyTorch model next to Qwen3-MoE, on a CPU
kernels  each kernel's time next to XLA's, predicted for a TPU that isn't there, or measured
train  tokens a second, compile time and utilisation of the train step on random tokens
generate  tokens a second and time to the first token, of models next to each other and to Qwen3-MoE
serve  a served engine under load: throughput, times to and between tokens, share of what exit depths allow
samplers  speed of a trained model with each sampler, how far its texts are the same, and accuracy of answers
`dreamer bench train --help` and the like explain the options."""


def run(arguments: list[str]) -> int:
    """Run the benchmark that the words name; returns the exit code."""
    if arguments and arguments[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    actions = {
        "train": _train,
        "checkpoint": bench_checkpoint.run,
        "data": bench_data.run,
        "export": bench_export.run,
        "generate": bench_generate.run,
        "kernels": bench_kernels.run,
        "samplers": bench_samplers.run,
        "serve": bench_serve.run,
    }
    if not arguments or arguments[0] not in actions:
        given = arguments[0] if arguments else ""
        alike = difflib.get_close_matches(given, list(actions), n=1)
        fix = f"; did you mean 'bench {alike[0]}'?" if alike else f"\n{USAGE}"
        raise UserError(f"bench: unknown benchmark '{given}'{fix}" if given else f"bench: which one?{fix}")
    return actions[arguments[0]](arguments[1:])


def _train(arguments: list[str]) -> int:
    words, overrides = split_overrides(arguments)
    options = _parser().parse_args(words)
    config = load_config(options.config, overrides).config
    if options.profile is not None and options.profile.exists() and not options.profile.is_dir():
        raise UserError(f"--profile {options.profile}: is a file; name a folder")
    from dreamer_jax.benchmarks.training import bench_train  # after the checks: importing jax takes a second

    found = bench_train(config, options.steps, options.against is not None, say, options.profile)
    print(json.dumps(found, indent=2, default=dataclasses.asdict) if options.json else _text(found))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench train",
        description="Time the real train step on random tokens.",
        epilog="Any `--section.key value` overrides a value of CONFIG. What is measured how: docs/benchmarks.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="CONFIG", required=True, help="a YAML file, or a name such as la_tiny")
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="also time Hugging Face's Qwen3-MoE of the same sizes, in turns (LA, CPU or NVIDIA GPU; extra bench)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="also trace three steps into DIR, for TensorBoard and Perfetto, and print the ten dearest operations",
    )
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="steps to time, of each side (20)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _text(found: Mapping[str, Any]) -> str:
    machine, ours = found["machine"], found["ours"]
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "devices"))
    lines = [
        f"{machine['devices']} x {machine['device']}; {versions}",
        f"compiled in {ours['compile_seconds']:.1f} s; "
        f"{ours['startup_cpu_seconds']:.1f} CPU seconds from start to the first finished step",
        _side("ours", ours),
    ]
    if "theirs" in found:
        theirs = found["theirs"]
        lines.append(_side("theirs", theirs) + f" (Qwen3-MoE, experts {theirs['experts']})")
        for kind, name in (("wall", "speed, ours / theirs"), ("cpu", "the same by CPU time")):
            ratio = found["ratio"][kind]
            lines.append(
                f"{name}: {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f} "
                f"over {found['ratio']['blocks']} blocks)"
            )
    if "operations" in found:
        from dreamer_jax.benchmarks.profiling import table

        lines.append(table(found["operations"], found["rates"]))
    return "\n".join(lines)


def _side(name: str, side: Mapping[str, Any]) -> str:
    line = (
        f"{name + ':':<8}{side['tokens_per_second']:,.0f} tokens/s; {side['seconds']:.3f} s and "
        f"{side['cpu_seconds']:.2f} CPU seconds a step ({side['average']}s of {side['steps']}); "
        f"{side['model_flops_per_second'] / 1e9:,.1f} model GFLOP/s"
    )
    if "model_flop_utilisation" in side:
        line += f"; MFU {side['model_flop_utilisation']:.1%}"
    return line
