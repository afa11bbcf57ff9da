"""`dreamer compare RUN RUN ...`: cost and held-out results of runs, side by side."""

from __future__ import annotations

import json
from pathlib import Path

from dreamer_jax.budget import analytic
from dreamer_jax.cli.budget import Parser
from dreamer_jax.config import UserError, load_config


def run(arguments: list[str]) -> int:
    """Print the table, and draw the figure that is asked for; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:  # --help has been printed
        return 0
    rows = [_row(Path(directory)) for directory in options.runs]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    if options.figure:
        from dreamer_jax.training.figures import draw_curves, heldout_loss

        curves = {
            f"{row['variant']} ({directory})": heldout_loss(Path(directory))
            for row, directory in zip(rows, options.runs, strict=True)
        }
        if not draw_curves(curves, "training tokens", "held-out loss (nats per token)", Path(options.figure)):
            raise UserError("none of the runs has been evaluated yet; see evaluation.every")
        print(f"figure {options.figure}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer compare", description="Cost and held-out results of runs, side by side.", allow_abbrev=False
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    parser.add_argument("--figure", metavar="FILE.png", help="also draw held-out loss over training tokens")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _row(directory: Path) -> dict[str, object]:
    summary = directory / "summary.json"
    if not summary.is_file():
        raise UserError(f"{directory} is not a finished run: it has no summary.json; finish it with `dreamer train`")
    config = load_config(directory / "config.yaml").config
    last = json.loads(summary.read_text(encoding="utf-8"))
    return {
        "run": str(directory),
        "variant": config.model.variant,
        "depth": config.model.depth,
        "parameters": int(analytic.total(analytic.parameters(config.model))),
        "flops_per_token": int(analytic.total(analytic.matmul_flops(config.model, config.data.sequence_length))),
        "steps": int(last["step"]),
        "tokens": int(last["tokens"]),
        "heldout_loss": last.get("heldout/loss"),
        "heldout_perplexity": last.get("heldout/perplexity"),
        "heldout_exact_match": last.get("heldout/exact_match"),
    }


def _print_table(rows: list[dict[str, object]]) -> None:
    """A line for each quantity, a column for each run: it stays readable in a narrow terminal."""
    lines = [[name.replace("_", " "), *(_cell(row[name]) for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *padded]))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
