"""`dreamer compare RUN RUN ...`: cost, held-out results and benchmarks of runs, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dreamer_jax.budget import analytic
from dreamer_jax.cli.arguments import Parser, figure_file
from dreamer_jax.config import Config
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.comparison import (
    AVERAGE,
    Curve,
    accuracies,
    average_of,
    best,
    data_efficiency,
    draw,
    in_common,
    questions_of,
)
from dreamer_jax.families import build
from dreamer_jax.json_files import read_object
from dreamer_jax.runs.folders import config_of_run, not_a_run, path_of
from dreamer_jax.runs.metrics import newest_values, read_metrics
from dreamer_jax.training.figures import heldout_curve
from dreamer_jax.training.recovery import recorded_config

LOSS = "held-out loss (nats per token)"


def run(arguments: list[str]) -> int:
    """Print the table, and draw the figure that is asked for; returns the exit code."""
    options = _parser().parse_args(arguments)
    figure = options.figure and figure_file("--figure", options.figure)
    directories = list(dict.fromkeys(str(Path(run)) for run in options.runs))  # a/ is a
    rows = [_row(Path(directory)) for directory in directories]
    configs = {directory: config_of_run(Path(directory)) for directory in directories}
    curves = {d: accuracies(Path(d), config, read_metrics(Path(d))) for d, config in configs.items()}
    own = any(AVERAGE in its for its in curves.values())
    shared = in_common(curves.values())
    curves = {directory: average_of(its, shared) for directory, its in curves.items()}
    baseline = _baseline(options.baseline, directories, rows)
    for row, directory in zip(rows, directories, strict=True):
        row |= _benchmarks(curves[directory], curves[baseline])
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows, own)
        for line in _other_questions({directory: questions_of(Path(directory)) for directory in directories}):
            print(line)
        for line in _other_data(configs):
            print(line)
        if len(rows) > 1 and any(row["data_efficiency"] for row in rows):
            print(f"data efficiency: against {baseline}")
        if own:
            print(f"average: {_of(shared)}")
    if figure:
        names = {directory: f"{row['variant']} ({directory})" for row, directory in zip(rows, directories, strict=True)}
        panels = {LOSS: {names[d]: heldout_curve(Path(d), config) for d, config in configs.items()}}
        for label in sorted({label for its in curves.values() for label in its}):
            panels[label] = {names[directory]: its.get(label, []) for directory, its in curves.items()}
        if not draw(panels, names[baseline], figure):
            raise UserError("none of the runs has been evaluated yet; see evaluation.every")
        print(f"figure {figure}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer compare",
        description="Cost, held-out results and benchmarks of runs, side by side.",
        epilog="Data efficiency: how many times fewer training tokens a run needs than the baseline to reach the "
        "baseline's best accuracy.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    parser.add_argument(
        "--baseline", metavar="RUN", help="the run that others are compared with (the first LA run, else the first)"
    )
    parser.add_argument(
        "--figure", metavar="FILE.png", help="also draw held-out loss and accuracies over training tokens"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _row(directory: Path) -> dict[str, Any]:
    summary = directory / "summary.json"
    if not (directory / "config.yaml").is_file():
        raise not_a_run(directory, directory)
    if not summary.is_file():
        raise UserError(f"{directory} is not a finished run: it has no summary.json; finish it with `dreamer train`")
    config = config_of_run(directory)
    fix = "`dreamer train` with its config.yaml makes it again"
    last = read_object(summary, fix, ("step", "tokens"))
    for name, value in last.items():
        if not isinstance(value, int | float):
            raise UserError(f"{summary} is damaged: '{name}' isn't a number; {fix}")
    newest = newest_values(read_metrics(directory))
    if newest.get("step", 0) > last["step"]:  # the run goes on, as do the curves that accuracies are taken from
        last = {"tokens": last["tokens"], **newest}
    model = build((recorded_config(path_of(directory)) or config).model)  # config.yaml may have been edited since
    context = analytic.average_context(config.data.places, model.flags.causal)
    return {
        "run": str(directory),
        "variant": getattr(config.model, "variant", config.model.family),
        "depth": model.depth,
        "parameters": int(analytic.total(analytic.parameters(model))),
        "flops_per_token": config.data.copies * int(analytic.total(analytic.matmul_flops(model, context))),
        "steps": int(last["step"]),
        "tokens": int(last["tokens"]),
        "heldout_loss": last.get("heldout/loss"),
        "heldout_perplexity": last.get("heldout/perplexity"),
        "heldout_exact_match": last.get("heldout/exact_match"),
    }


def _baseline(asked: str | None, directories: list[str], rows: list[dict[str, Any]]) -> str:
    if asked is None:
        layered = (d for d, row in zip(directories, rows, strict=True) if row["variant"] == "LA")
        return next(layered, directories[0])
    if str(Path(asked)) not in directories:
        raise UserError(f"--baseline {asked} is none of the runs that are compared: {', '.join(directories)}")
    return str(Path(asked))


def _benchmarks(curves: dict[str, Curve], baseline: dict[str, Curve]) -> dict[str, Any]:
    """Best accuracy of each benchmark, and the data efficiency."""
    tops = {label: best(curve) for label, curve in curves.items()}
    return {
        "accuracy": {label: top[1] for label, top in tops.items() if top},
        "data_efficiency": {label: data_efficiency(curve, baseline.get(label, [])) for label, curve in curves.items()},
    }


def _of(labels: list[str]) -> str:
    return f"of {', '.join(labels)}" if len(labels) > 1 else "none, as the runs have no two benchmarks in common"


def _other_data(configs: dict[str, Config]) -> list[str]:
    """A line where the held-out results of runs are of different data."""

    def held(config: Config) -> dict[str, Any]:
        data = config.data
        keys = {"task": ("task", "difficulty"), "puzzle": ("puzzle",)}.get(data.source, ("prompt", "completion"))
        if data.source in ("jsonl", "prepared"):
            keys += ("tokenizer", *(("heldout_path",) if data.heldout_path else ("path", "heldout_records")))
        return {key: getattr(data, key) for key in ("source", *keys)}

    first, *others = configs
    for other in others:
        one, two = held(configs[first]), held(configs[other])
        different = [f"data.{key}" for key in {**one, **two} if one.get(key) != two.get(key)]
        if different:
            return [f"held-out results are of other data: {other} differs from {first} in {', '.join(different)}"]
    return []


def _other_questions(runs: dict[str, dict[str, set[int]]]) -> list[str]:
    """A line for each benchmark of which not all evaluations asked the same number of questions."""
    lines = []
    for label in sorted({label for its in runs.values() for label in its}):
        counts = {directory: its[label] for directory, its in runs.items() if label in its}
        if len(set.union(*counts.values())) > 1:
            each = ", ".join(f"{' or '.join(f'{n:,}' for n in sorted(ns))} in {run}" for run, ns in counts.items())
            lines.append(f"{label}: not all accuracies are of the same questions: {each}")
    return lines


def _print_table(rows: list[dict[str, Any]], average: bool) -> None:
    """A line for each quantity, a column for each run: it stays readable in a narrow terminal."""
    plain = [name for name in rows[0] if name not in ("accuracy", "data_efficiency")]
    lines = [[name.replace("_", " "), *(_cell(row[name]) for row in rows)] for name in plain]
    labels = {label for row in rows for label in row["accuracy"]} | ({AVERAGE} if average else set())
    for label in sorted(labels):
        shares = (row["accuracy"].get(label) for row in rows)
        lines.append([f"{label} accuracy", *("-" if share is None else f"{share:.2%}" for share in shares)])
        factors = (row["data_efficiency"].get(label) for row in rows)
        lines.append([f"{label} data efficiency", *("-" if factor is None else f"{factor:.2f}" for factor in factors)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *padded]))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
