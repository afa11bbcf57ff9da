"""`dreamer frontier graph|boolean|family`: accuracy by task depth and thinking steps, beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive, say, split_overrides
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Train, evaluate, draw and print; returns the exit code."""
    words, overrides = split_overrides(arguments)
    options = _parser().parse_args(words)
    if any(word.partition("=")[0] == "--run.dir" for word in overrides):
        raise UserError("frontier: runs lie in the study's folder; leave --run.dir out, and name the folder with --out")
    if any(word.partition("=")[0] == "--run.seed" for word in overrides):
        raise UserError("frontier: runs have the seeds from 0 on; leave --run.seed out, and say how many with --seeds")
    from dreamer_jax.studies.frontier import study
    from dreamer_jax.studies.variants import variants_of

    variants = variants_of(options.task, options.preset, options.ablation, options.model, overrides)
    folder = Path(options.out or f"runs/frontier/{options.task}_{options.preset}")
    if folder.is_file():
        raise UserError(f"--out {folder}: is a file; name a folder")
    seeds = options.seeds or (3 if options.preset == "paper" and options.task == "graph" else 1)
    result, code = study(
        options.task, options.preset, variants, seeds, folder, options.instances, options.ablation, say
    )
    if code:
        return code
    from dreamer_jax.studies.frontier_figures import draw
    from dreamer_jax.studies.frontier_tables import markdown

    (folder / "frontier.md").write_text(markdown(result), encoding="utf-8")
    _print(result)
    for path in draw(result, folder):
        print(f"figure {path}")
    print(f"done: {folder / 'frontier.json'}, {folder / 'frontier.md'}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer frontier",
        usage="dreamer frontier graph|boolean|family [options] [--section.key value ...]",
        description="Trains the models of a paper, evaluates every task depth after every number of thinking "
        "steps, and shows the result beside the paper's. The same command goes on with a study that was stopped.",
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", choices=("graph", "boolean", "family"), help="graph, boolean or family")
    parser.add_argument(
        "--preset", choices=("paper", "laptop"), default="paper", help="size of models and runs (paper)"
    )
    parser.add_argument("--seeds", type=positive, help="runs of each model (3 for graphs of the paper's size, else 1)")
    parser.add_argument("--out", metavar="DIR", help="the folder of the study (runs/frontier/TASK_PRESET)")
    parser.add_argument("--ablation", action="store_true", help="also Table 1, and models without one of their parts")
    parser.add_argument(
        "--model",
        metavar="NAME",
        action="append",
        default=[],
        help="also another model with as many parameters: dr, dreamer, huginn or a YAML file; --model.key is then its",
    )
    parser.add_argument("--instances", type=positive, default=2000, help="for every task depth (2000)")
    return parser


def _print(result: dict[str, Any]) -> None:
    """A table for every model: accuracy, and behind it the difference from the paper."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from dreamer_jax.studies.frontier import mean_cells, published_cells, size, supervision
    from dreamer_jax.studies.published import PUBLISHED, TABLE_1

    console, paper = Console(highlight=False), published_cells(result)
    for name, model in result["models"].items():
        title = f"{name}: {model['headline']}, {size(model)}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in (PUBLISHED[result["task"]].unit, *(f"T={step}" for step in result["steps"])):
            table.add_column(heading, justify="right")
        for depth, cells, theirs in zip(result["depths"], mean_cells(result, name), paper, strict=True):
            pairs = zip(cells, theirs, strict=True)
            table.add_row(str(depth), *(f"{a:.2f} {a - b:+.2f}" if np.isfinite(b) else f"{a:.2f}" for a, b in pairs))
        console.print(table)
    if result["task"] == "graph" and len(result["models"]) > 1:
        table = Table("Table 1", "12 hops after one step", "8 hops, T >= 12", box=None, pad_edge=False)
        rows = {f"the paper, {where}": numbers for where, numbers in TABLE_1.items()}
        rows |= {name: supervision(result, name) for name in result["models"]}
        for name, numbers in rows.items():
            table.add_row(name, f"{numbers['shortcut']:.2f}", f"{numbers['far']:.2f}")
        console.print(table)
