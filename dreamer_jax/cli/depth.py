"""`dreamer depth RUN`: held-out loss of a trained model at other depths than the trained one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dreamer_jax.cli.arguments import Parser, positive, say


def run(arguments: list[str]) -> int:
    """Evaluate and print; returns the exit code."""
    options = _parser().parse_args(arguments)
    from dreamer_jax.studies.depths import FILE, by_depth

    folder = Path(options.run)
    found = by_depth(folder, options.depths, say)
    if options.json:
        print(json.dumps({str(depth): its for depth, its in found.items()}, indent=2))
        return 0
    names = list(next(iter(found.values())))
    print("  ".join(["depth", *(name.replace("_", " ").rjust(12) for name in names)]))
    for depth, its in found.items():
        print("  ".join([f"{depth:5}", *(f"{its[name]:12.4f}" for name in names)]))
    print(f"written to {folder / FILE}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer depth",
        description="Held-out loss, perplexity and exact match of a run at other depths than the trained one.",
        epilog="The newest checkpoint is taken. What has been computed of it is not computed again.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--depths",
        type=_depths,
        help="commas between them (1, 2, 4, ... up to four times the trained depth, and that one)",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _depths(text: str) -> list[int]:
    try:
        return [positive(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; write --depths 1,2,4") from None
