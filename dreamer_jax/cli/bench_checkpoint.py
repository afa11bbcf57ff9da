"""`dreamer bench checkpoint --config CONFIG`: what saving costs training, and what restoring costs memory."""

from __future__ import annotations

import json

from dreamer_jax.cli.arguments import Parser, positive, say, split_overrides
from dreamer_jax.config import load_config


def run(arguments: list[str]) -> int:
    """Measure, and print the result; returns the exit code."""
    words, overrides = split_overrides(arguments)
    options = _parser().parse_args(words)
    config = load_config(options.config, overrides).config
    from dreamer_jax.benchmarks.checkpoints import bench_checkpoint  # importing jax takes a second

    found = bench_checkpoint(config, options.steps, options.pairs, say)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    differences = found["differences"]
    print(
        f"{found['machine']['devices']} x {found['machine']['device']}; state {found['state_bytes'] / 1e6:.1f} MB, "
        f"step {found['step_seconds']:.3f} s\n"
        f"a save blocks the loop for {found['blocking_seconds'] * 1e3:.0f} ms and takes {found['extra_seconds']:.2f} s "
        f"in all ({min(differences):.2f} to {max(differences):.2f}): {found['overhead']:.2%} of training with "
        f"checkpoint.every {found['every']}\n"
        f"verifying takes {found['verify_seconds']:.2f} s, restoring {found['restore_seconds']:.2f} s and at most "
        f"{found['restore_memory']:.2f} times the state's memory"
    )
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer bench checkpoint",
        description="Time blocks of train steps with and without a save; then restore in a new process.",
        epilog="Any `--section.key value` overrides a value of CONFIG.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="CONFIG", required=True, help="a YAML file, or a name such as quickstart")
    parser.add_argument("--steps", type=positive, default=30, metavar="N", help="steps of a block (30)")
    parser.add_argument("--pairs", type=positive, default=5, metavar="N", help="pairs of blocks (5)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser
