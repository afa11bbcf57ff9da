"""`dreamer depth RUN`: a trained model at other depths than the trained one: loss, accuracy, and what its steps do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.cli.arguments import Parser, natural, positive, say
from dreamer_jax.errors import UserError

LINES = 16
"""Depths of a pass that are printed, about; the files have all."""


def run(arguments: list[str]) -> int:
    """Measure and print; returns the exit code."""
    options = _parser().parse_args(arguments)
    folder = Path(options.run)
    if options.loss_only:
        if options.rows is not None or options.seed is not None:
            raise UserError("--loss-only looks at all held-out records; leave --rows and --seed out")
        return _loss_only(folder, options)
    if options.experts:
        raise UserError("--experts goes with --loss-only; of one run dreamer analyze says more about experts")
    from dreamer_jax.studies.depth_report import INSTANCES, ROWS, highlights, report

    numbers = options.rows or ROWS, options.instances or INSTANCES, options.seed or 0
    file, result = report(folder, options.depths, say, *numbers)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(_heading(result["model"], result["run"], result["step"], result["trained"]))
    print(_table(result["depths"], result["trained"]))
    if "difficulty" in result:
        print("\n" + _difficulty_table(result["difficulty"], result["trained"]))
    print("\n" + _pass_table(result["passes"]) + "\n")
    lines = highlights(result)
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        print(f"{label:<{width}}  {value}")
    print(f"done: {file}")
    return 0


def _loss_only(folder: Path, options: argparse.Namespace) -> int:
    from dreamer_jax.studies.depths import FILE, checked, heldout, open_run, usual_depths
    from dreamer_jax.studies.difficulty import accuracy, generated, hardest

    model, kept = open_run(folder)
    if options.instances and not generated(model.config):
        raise UserError(f"{folder}: only generated tasks have difficulties; leave --instances out")
    depths = checked(model.family, usual_depths(model.family) if options.depths is None else options.depths)
    found: dict[str, Any] = {"depths": {str(d): its for d, its in heldout(folder, model, depths, kept, say).items()}}
    if options.instances:
        right = accuracy(model, depths, options.instances, kept, say)
        of_depth = {str(level): {str(depth): its for depth, its in row.items()} for level, row in right.items()}
        found["difficulty"] = {
            "trained_to": hardest(model.config),
            "instances": options.instances,
            "accuracy": of_depth,
        }
    if options.experts:
        from dreamer_jax.studies.expert_use import expert_use

        found["gini"] = expert_use(model, kept, say)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(_heading(model.family.headline(), folder.name, model.step, model.family.depth))
    print(_table(found["depths"], model.family.depth))
    for router, value in found.get("gini", {}).items():
        print(f"Gini coefficient of the experts of {router}: {value:.3f}")
    if "gini" in found and not found["gini"]:
        print("The model has no experts.")
    if "difficulty" in found:
        print("\n" + _difficulty_table(found["difficulty"], model.family.depth))
    print(f"written to {folder / FILE}")
    return 0


def _heading(model: str, run: str, step: int, trained: int) -> str:
    return f"{model}: {run}, checkpoint {step:,}, trained at depth {trained} (*)"


def _table(by_depth: Mapping[str, Mapping[str, float]], trained: int) -> str:
    """Depths below one another."""
    names = list(next(iter(by_depth.values())))
    lines = ["  ".join(["  depth", *(name.replace("_", " ").rjust(12) for name in names)])]
    for depth, its in by_depth.items():
        mark = "*" if int(depth) == trained else " "
        lines.append("  ".join([f"{mark} {depth:>5}", *(f"{its[name]:12.4f}" for name in names)]))
    return "\n".join(lines)


def _difficulty_table(found: Mapping[str, Any], trained: int) -> str:
    """Difficulties beside one another, the harder ones behind a line."""
    by_difficulty = found["accuracy"]
    bar = {level: " |" if int(level) == found["trained_to"] + 1 else "" for level in by_difficulty}
    lines = [f"right answers by difficulty, of {found['instances']} instances each; behind | harder than in training"]
    lines.append("  depth" + "".join(f"{bar[level]}{level:>6}" for level in by_difficulty))
    for depth in next(iter(by_difficulty.values())):
        mark = "*" if int(depth) == trained else " "
        cells = "".join(f"{bar[level]}{row[depth]:6.2f}" for level, row in by_difficulty.items())
        lines.append(f"{mark} {depth:>5}{cells}")
    return "\n".join(lines)


def _pass_table(passes: Mapping[str, Any]) -> str:
    """What single passes do after each depth, or `LINES` of them, side by side."""
    from dreamer_jax.studies.depth_report import even

    measured = passes[max(passes, key=int)]["spectral_radius"]["depths"]
    shown = {int(depth) - 1 for depth in passes} | {measured[i] - 1 for i in even(len(measured), LINES)}
    lines = ["       " + "".join(f" |{f'a pass of depth {depth}':^35}" for depth in passes)]
    lines.append("  depth" + f" |{'norm':>10}{'change':>10}{'radius':>8}{'stand':>7}" * len(passes))
    for l in sorted(shown):
        cells = (f" |{_of_pass(its, l) if l < int(depth) else '':35}" for depth, its in passes.items())
        lines.append(f"  {l + 1:>5}" + "".join(cells).rstrip())
    lines.append(
        "change: |x' - x| / |x|; radius: spectral radius of the step; stand: targets whose answer stays from here"
    )
    return "\n".join(lines)


def _of_pass(its: Mapping[str, Any], l: int) -> str:
    """Norm, change, spectral radius and settled share after one depth."""
    radius = dict(zip(its["spectral_radius"]["depths"], its["spectral_radius"]["mean"], strict=True))
    stand = sum(its["needed"][: l + 1]) / max(1, sum(its["needed"]))

    def cell(value: float | None, width: int, form: str) -> str:
        return format("-" if value is None else format(value, form), f">{width}")

    numbers = cell(its["norm"][l], 10, ".3f"), cell(its["residual"][l], 10, ".4f")
    return "".join((*numbers, cell(radius.get(l + 1), 8, ".3f"), cell(stand, 7, ".0%")))


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer depth",
        description="A run at other depths than the trained one: held-out loss, perplexity and exact match, accuracy "
        "by difficulty, agreement with the trained depth; norms, changes and spectral radius of its steps, and how "
        "many depths tokens need. Writes depth.json and depth/report.html into the run.",
        epilog="The newest checkpoint is taken. What has been computed of it is not computed again.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--depths",
        type=_depths,
        help="commas between them; the trained one is measured beside them (all up to four times the trained depth, or "
        "32 of them; with --loss-only these alone, or the powers of two and the trained depth)",
    )
    parser.add_argument(
        "--loss-only",
        action="store_true",
        help="held-out loss, perplexity and exact match, no report; with --instances also accuracy by difficulty",
    )
    parser.add_argument(
        "--experts", action="store_true", help="with --loss-only: how evenly experts are used on data of training"
    )
    parser.add_argument("--rows", type=positive, help="held-out rows to look at within passes (16)")
    parser.add_argument("--instances", type=positive, help="instances of each difficulty of a generated task (64)")
    parser.add_argument("--seed", type=natural, help="of the vectors that power iteration starts with (0)")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    return parser


def _depths(text: str) -> list[int]:
    try:
        return [positive(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; write --depths 1,2,4") from None
