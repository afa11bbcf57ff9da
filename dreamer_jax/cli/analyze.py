"""`dreamer analyze RUN`: what depth attention and experts of a trained model do, how its states converge; a report."""

from __future__ import annotations

from dreamer_jax.cli.arguments import Parser, natural
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Analyse a run and print its numbers; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.sequences < 1:
        raise UserError(f"--sequences {options.sequences}: needs at least one sequence")
    from dreamer_jax.analysis.analyze import analyze
    from dreamer_jax.analysis.report import numbers

    folder, summary = analyze(options.run, options.out, options.data, options.sequences, options.seed, options.compare)
    left_out = f"; left out: {summary['too_long']:,} longer than a row" if summary["too_long"] else ""
    print(f"{summary['sequences']:,} sequences, {summary['tokens']:,} tokens{left_out}")
    width = max(len(label) for label, _, _ in numbers(summary))
    for label, value, paper in numbers(summary):
        print(f"{label:<{width}}  {value}" + (f"  (paper: {paper})" if paper else ""))
    print(f"done: {folder / 'report.html'}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer analyze",
        description="Depth attention, experts and convergence over held-out sequences: report.html, figures, numbers.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or one checkpoint in it (RUN/checkpoints/500)")
    parser.add_argument(
        "--data", default="", help="a JSONL file with the run's fields, or prepared data (the run's held-out data)"
    )
    parser.add_argument("--sequences", type=int, default=1000, help="sequences, chosen at random (1000)")
    parser.add_argument("--seed", type=natural, default=0, help="of that choice (0)")
    parser.add_argument("--compare", metavar="RUN", help="an LA run to draw beside this one in Fig. 6")
    parser.add_argument(
        "--out", metavar="DIR", help="the folder to write (RUN/analysis; of checkpoint N: RUN/analysis-N)"
    )
    return parser
