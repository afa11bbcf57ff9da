"""`dreamer bench export --config CONFIG`: speed of the exported PyTorch model next to Qwen3-MoE, on a CPU."""

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
    config = load_config(options.config, overrides).config
    peer = load_config(options.peer, []).config if options.peer else config
    from dreamer_jax.benchmarks.export import bench_export  # after the checks: importing jax takes a second

    found = bench_export(
        config, peer, options.dtype, options.prompt_tokens, options.tokens, options.rounds, options.threads, say
    )
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench export",
        description="Time the PyTorch model of an export and Hugging Face's Qwen3-MoE in turns, with random weights.",
        epilog="Any `--section.key value` overrides a value of CONFIG. Needs the extra bench.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="CONFIG", required=True, help="our model: a YAML file, or a name such as la_tiny")
    add("--peer", metavar="CONFIG", help="an LA configuration whose sizes Qwen3-MoE gets (CONFIG)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both (float32)")
    add("--prompt-tokens", type=positive, default=128, metavar="N", help="tokens of the prompt (128)")
    add("--tokens", type=positive, default=16, metavar="N", help="tokens to decode (16)")
    add("--rounds", type=positive, default=61, metavar="N", help="turns of each side (61)")
    add("--threads", type=positive, default=1, metavar="N", help="of torch; with one, CPU time is measured (1)")
    add("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _text(found: Mapping[str, Any]) -> str:
    ours, theirs, machine = found["ours"], found["theirs"], found["machine"]
    lines = [
        f"torch {machine['torch']}, transformers {machine['transformers']}, {machine['threads']} threads; "
        f"{found['dtype']}, a prompt of {found['prompt']} tokens",
        f"parameters: ours {ours['parameters'] / 1e6:.1f} M, Qwen3-MoE {theirs['parameters'] / 1e6:.1f} M "
        f"(experts {theirs['experts']})",
    ]
    for part, name in (("prefill", "prefill"), ("decode", "one token")):
        ratio = found["ratio"][part]
        lines.append(
            f"{name}: {1e3 * ours[part]:.2f} ms, Qwen3-MoE {1e3 * theirs[part]:.2f} ms; speed, ours / theirs: "
            f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
        )
    return "\n".join(lines)
