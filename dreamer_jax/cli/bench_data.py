"""`dreamer bench data`: tokens a second of tokenizing, preparing and feeding, and the memory it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive, say


def run(arguments: list[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = Parser(
        prog="dreamer bench data",
        description="Prepare data and feed them, on generated text or on the sources of a mixture file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mixture", metavar="FILE", default="", help="a mixture (file or name) instead of generated text"
    )
    parser.add_argument("--tokenizer", metavar="SPEC", default="bytes", help="of generated text (bytes)")
    parser.add_argument("--megabytes", type=positive, default=50, metavar="N", help="of generated text (50)")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="processes that prepare (2)")
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="batches of 32 rows to feed (100)")
    parser.add_argument("--sequence-length", type=positive, default=4096, metavar="S", help="tokens in a row (4096)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args(arguments)
    from dreamer_jax.benchmarks.data import bench_data

    found = bench_data(
        options.mixture,
        options.tokenizer,
        options.megabytes,
        options.workers,
        options.steps,
        options.sequence_length,
        say,
    )
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 0


def _text(found: Mapping[str, Any]) -> str:
    names = {"tokenizer": "tokenizing", "prepare": "preparing", "pipeline": "feeding"}
    lines = [
        f"{label:<11}{found[name]['tokens_per_second']:>13,.0f} tokens/s, "
        f"{found[name]['tokens_per_cpu_second']:>13,.0f} tokens per CPU second "
        f"({found[name]['tokens']:,} tokens in {found[name]['seconds']:.1f} s)"
        for name, label in names.items()
    ]
    memory = found["prepare"]["peak_megabytes"]
    worker = f", {memory['worker']:,} MB in the largest of {found['workers']} workers" if memory["worker"] else ""
    return "\n".join([*lines, f"preparing took at most {memory['main']:,} MB in the main process{worker}"])
