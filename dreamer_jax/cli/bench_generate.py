"""`dreamer bench generate --config CONFIG ...`: how fast models generate, next to each other and to Qwen3-MoE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive, say, split_overrides
from dreamer_jax.config import load_config


def run(arguments: list[str]) -> int:
    """Run the benchmark and print its numbers; returns the exit code."""
    words, overrides = split_overrides(arguments)
    options = _parser().parse_args(words)
    configs = [(word.removesuffix(".yaml"), load_config(word, overrides).config) for word in options.config]
    from dreamer_jax.benchmarks.generation import bench_generate  # after the checks: importing jax takes a second

    found = bench_generate(
        configs,
        options.batch or [1, 16],
        options.prompt_tokens,
        options.tokens,
        options.rounds,
        options.against is not None,
        options.int8,
        say,
    )
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench generate",
        description="Time greedy generation from random weights, all models in turn.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config",
        metavar="CONFIG",
        action="append",
        required=True,
        help="a YAML file or a name; may be given several times",
    )
    add(
        "--against",
        choices=["transformers"],
        help="also time Hugging Face's Qwen3-MoE of the first's sizes (LA, CPU or NVIDIA GPU; extra bench)",
    )
    add("--int8", action="store_true", help="also each of ours with its experts' matrices in eight bits")
    add("--batch", type=positive, action="append", metavar="B", help="rows at once; may be given several times (1, 16)")
    add("--prompt-tokens", type=positive, default=64, metavar="N", help="tokens of a prompt (64)")
    add("--tokens", type=positive, default=64, metavar="N", help="tokens to generate (64)")
    add("--rounds", type=positive, default=7, metavar="N", help="turns of each side (7)")
    add("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _text(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "devices"))
    lines = [
        f"{machine['devices']} x {machine['device']}; {versions}",
        f"{found['prompt_tokens']} tokens of prompt and {found['tokens']} generated ones",
    ]
    for batch, sides in found["sides"].items():
        for name, side in sides.items():
            line = (
                f"batch {batch:>3}  {name:<24}{side['tokens_per_second']:>8,.0f} tokens/s; "
                f"first token after {side['seconds_to_first_token'] * 1000:,.0f} ms"
            )
            ratio = found.get("ratios", {}).get(batch, {}).get(name)
            if ratio:
                line += f"; {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}) times Qwen3-MoE"
            lines.append(line)
    return "\n".join(lines)
