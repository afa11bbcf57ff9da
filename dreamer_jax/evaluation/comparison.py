"""Runs side by side: accuracy over training tokens, and how many fewer a run needs than the baseline (Table 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.config.sections import Config
from dreamer_jax.errors import UserError
from dreamer_jax.json_files import read_object

Curve = list[tuple[float, float]]
"""(tokens trained on, value), tokens rising."""

AVERAGE = "average"
HELDOUT = "held-out"
HEADLINES = {"gsm8k": "strict", "math": "boxed", "mmlu_math": "acc", "mathqa": "acc"}
"""Benchmark -> the metric that is compared."""
_MEND = "remove it, and `dreamer eval` makes it again of its records"


def read_results(path: Path) -> dict[str, Any]:
    """What `dreamer eval` wrote of a checkpoint: `source` and `tasks`.

    Raises:
        UserError: it is damaged.
    """
    return read_object(path, _MEND, ("source", "tasks"))


def accuracies(directory: Path, config: Config, metrics: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Accuracy of a run over training tokens, by benchmark.

    Args:
        directory: the run; what `dreamer eval` wrote for its checkpoints is read (at the trained depth and precision,
            not what `--depth` and `--dtype` changed), and wins over what was measured during training.
        config: of the run.
        metrics: the records of its metrics.jsonl.

    Returns:
        Curves by label (gsm8k, gsm8k-5shot, ...), exact match over the held-out set of a built-in task or file as
        `HELDOUT`, and `AVERAGE` where there are several benchmarks.
    """
    tokens_of_step = config.training.batch_size * config.data.sequence_length
    points: dict[str, dict[int, float]] = {}
    for record in metrics:
        for name, value in record.items():
            label = HELDOUT if name == "heldout/exact_match" else _label(name)
            if label:
                points.setdefault(label, {})[int(record["step"])] = value
    for label, step, value, _ in _measured(directory):
        points.setdefault(label, {})[step] = value
    curves: dict[str, Curve] = {
        label: [(float(step * tokens_of_step), value) for step, value in sorted(its.items())]
        for label, its in points.items()
    }
    # Whole solutions of a held-out file are hardly ever matched word by word: a curve of zeros says nothing.
    if HELDOUT in curves and not any(value for _, value in curves[HELDOUT]):
        del curves[HELDOUT]
    return average_of(curves, _benchmarks(curves))


def _benchmarks(curves: Mapping[str, Curve]) -> list[str]:
    return [label for label in curves if label not in (HELDOUT, AVERAGE)]


def average_of(curves: Mapping[str, Curve], labels: Sequence[str]) -> dict[str, Curve]:
    """The curves, with `AVERAGE` over these labels where they are several."""
    others = {label: curve for label, curve in curves.items() if label != AVERAGE}
    return others | ({AVERAGE: average([curves[label] for label in labels])} if len(labels) > 1 else {})


def in_common(runs: Iterable[Mapping[str, Curve]]) -> list[str]:
    """The benchmarks that all runs have, in order of their names."""
    return sorted(set.intersection(*(set(_benchmarks(curves)) for curves in runs)))


def questions_of(directory: Path) -> dict[str, set[int]]:
    """How many questions of each benchmark the evaluations of a run have asked, as far as `dreamer eval` kept them."""
    counts: dict[str, set[int]] = {}
    for label, _, _, questions in _measured(directory):
        counts.setdefault(label, set()).add(questions)
    return counts


def _measured(directory: Path) -> Iterator[tuple[str, int, float, int]]:
    """(label, step, accuracy, questions) of every benchmark in the results of a run's checkpoints."""
    for path in directory.glob("evaluation/step-*/results.json"):
        if not path.parent.name.removeprefix("step-").isdigit():
            continue
        content = read_results(path)
        try:
            step = int(content["source"]["step"])
            for label, result in content["tasks"].items():
                headline = HEADLINES.get(result["task"])
                if headline:
                    yield label, step, float(result["metrics"][headline]["value"]), int(result["questions"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path} is damaged: {reason}; {_MEND}") from None


def _label(name: str) -> str | None:
    """gsm8k-5shot of the metric eval/gsm8k-5shot/strict; None of a metric that isn't compared."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] != "eval":
        return None
    return parts[1] if HEADLINES.get(parts[1].partition("-")[0]) == parts[2] else None


def average(curves: Sequence[Curve]) -> Curve:
    """Mean of curves, where all of them were measured.

    The best of this curve is the paper's "average" accuracy: 32.3 for its LA of depth 16, whose four best accuracies
    have a mean of 33.6; and the data efficiency of "average" is that of this curve, not the mean of the others.
    """
    tables = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    return [(tokens, math.fsum(table[tokens] for table in tables) / len(tables)) for tokens in shared]


def best(curve: Curve) -> tuple[float, float] | None:
    """(tokens, value) where a curve is highest, the first of equals; None of an empty one."""
    return max(curve, key=lambda point: point[1]) if curve else None


def tokens_to_reach(curve: Curve, level: float) -> float | None:
    """Tokens at which a curve first reaches a level, on straight lines between measurements; None if it never does."""
    before: tuple[float, float] | None = None
    for tokens, value in curve:
        if value >= level:
            if before is None or value == level:
                return tokens
            share = (level - before[1]) / (value - before[1])
            return before[0] + share * (tokens - before[0])
        before = tokens, value
    return None


def data_efficiency(curve: Curve, baseline: Curve) -> float | None:
    """How many times fewer training tokens a run needs to reach the baseline's best accuracy (Table 2's DE).

    1 for the baseline itself; None if the run never gets there, nothing was measured, or the baseline's best is an
    accuracy of 0, which every curve has reached.
    """
    top = best(baseline)
    reached = tokens_to_reach(curve, top[1]) if top and top[1] else None
    return top[0] / reached if top and reached else None


def draw(curves: Mapping[str, Mapping[str, Curve]], baseline: str, path: Path) -> bool:
    """Draw panels side by side like Fig. 3; False, and no file, if there is nothing to draw.

    Args:
        curves: title of a panel -> name of a run -> its curve. In panels of accuracies (all but those whose title
            holds "loss") the baseline's best is a dashed line, with the data efficiency where another run crosses it.
        baseline: name of a run.
        path: a PNG.
    """
    panels = {title: its for title, its in curves.items() if any(its.values())}
    if not panels:
        return False
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (6, 3.6) if len(panels) == 1 else (4.2 * columns, 3.2 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, its) in zip(grid.flat, panels.items(), strict=False):
        for name, points in its.items():
            if points:
                few = "o" if len(points) < 30 else None
                axes.plot(*zip(*points, strict=True), label=name, marker=few, markersize=3)
        if "loss" in title:
            axes.set(xlabel="training tokens", ylabel=title)
        else:
            axes.set(xlabel="training tokens", ylabel="accuracy", title=title)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            _mark_efficiency(axes, its, baseline)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    grid.flat[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _mark_efficiency(axes: Any, curves: Mapping[str, Curve], baseline: str) -> None:
    top = best(curves.get(baseline, []))
    if top is None:
        return
    axes.axhline(top[1], linestyle="--", linewidth=1, color="gray")
    for name, curve in curves.items():
        factor = data_efficiency(curve, curves[baseline])
        if name != baseline and factor is not None:
            place = (top[0] / factor, top[1])
            axes.plot(*place, marker="x", color="gray", markersize=5)
            axes.annotate(f"{factor:.1f}x", place, textcoords="offset points", xytext=(3, 4), fontsize=8)
