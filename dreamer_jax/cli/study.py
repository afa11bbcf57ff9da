"""`dreamer study STUDY`: members matched in cost, trained alike with several seeds, and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.cli.arguments import Parser, natural, positive, say, split_overrides
from dreamer_jax.config.loading import split_words
from dreamer_jax.configs import names
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Plan, or train and print; returns the exit code."""
    words, overrides = split_overrides(arguments)
    options = _parser().parse_args(words)
    from dreamer_jax.studies.study_file import only, quick, read_study, settled

    if options.slice and not options.plan:
        raise UserError("study: --slice has a meaning only with --plan")
    study = only(read_study(options.study), _names(options.tasks), _names(options.members), options.seeds)
    if options.quick:
        study = quick(study)
    changes = split_words(overrides)
    if any(word.key == "run.dir" for word in changes):
        raise UserError("study: runs of a study lie in its folder; leave --run.dir out, and name the folder with --out")
    if any(word.key == "run.seed" for word in changes):
        raise UserError("study: leave --run.seed out, and name the seeds of its runs with --seeds")
    study = settled(study, changes)
    if options.plan:
        from dreamer_jax.studies.study_plan import plan

        print(plan(study, changes, options.slice, say))
        return 0
    from dreamer_jax.studies.comparison import markdown
    from dreamer_jax.studies.study import FILE, conduct
    from dreamer_jax.studies.study_figure import draw

    folder = Path(options.out or f"runs/studies/{study.path.stem}{'_quick' if options.quick else ''}")
    result, code = conduct(study, changes, folder, options.jobs, say)
    if code:
        return code
    (folder / "study.md").write_text(markdown(result), encoding="utf-8")
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    _print(result)
    for path in draw(result, folder):
        print(f"figure {path}")
    print(f"done: {folder / FILE}, {folder / 'study.md'}")
    return 0


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in listed.split(",")] if listed else []


def _seeds(listed: str) -> list[int]:
    return [natural(seed.strip()) for seed in listed.split(",")]


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer study",
        usage="dreamer study STUDY [options] [--section.key value ...]",
        description="Trains the members of a study on its tasks, all with the same tokens and, unless the file says "
        "otherwise, at the same cost, and shows the best of each with its data efficiency over the baseline. The same "
        "command goes on with a study that was stopped.",
        epilog="What a file says: docs/studies.md. A setting on the command line is one of all runs; nothing is swept "
        "that is set there.",
        allow_abbrev=False,
    )
    known = ", ".join(names(["study"]))
    parser.add_argument("study", metavar="STUDY", help=f"a YAML file, or a study of the package: {known}")
    parser.add_argument("--out", metavar="DIR", help="the folder of the study (runs/studies/NAME)")
    parser.add_argument("--tasks", metavar="NAMES", help="of its tasks only these, with commas between them")
    parser.add_argument("--members", metavar="NAMES", help="of its members only these, with the costs of all")
    parser.add_argument(
        "--seeds",
        metavar="NUMBERS",
        type=_seeds,
        default=(),
        help="runs of these seeds, such as 3,4 for two more than the file's three",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, help="runs at once; each has its share of the cores, or its device (1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, a sixteenth of the tokens, two values of a sweep"
    )
    parser.add_argument("--plan", action="store_true", help="train nothing: say what it costs in FLOPs and time")
    parser.add_argument("--slice", metavar="TOPOLOGY", help="with --plan: of a TPU slice such as v5e:2x2, by roofline")
    parser.add_argument("--json", action="store_true", help="print study.json instead of tables")
    return parser


def _print(result: Mapping[str, Any]) -> None:
    from dreamer_jax.budget.report import table
    from dreamer_jax.studies.comparison import cells, header, rows_of

    for name, task in result["tasks"].items():
        print(f"{name}: {task['tokens']:,} tokens, data efficiency over {result['baseline']}")
        print(table(header(task["metric"]), [cells(row) for row in rows_of(result, name)]) + "\n")
