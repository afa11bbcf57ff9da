"""Curves of runs, drawn from their metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dreamer_jax.config import load_config
from dreamer_jax.config.sections import Config
from dreamer_jax.families import Family, build
from dreamer_jax.runs.metrics import read_metrics

Curve = list[tuple[float, float]]


def draw_figures(directory: Path) -> list[Path]:
    """Write figures/loss.png, and figures/accuracy.png where exact match was measured; returns their paths."""
    records = read_metrics(directory)
    folder = directory / "figures"
    folder.mkdir(exist_ok=True)
    own, training = "loss", "training"
    if any("last_loss" in record for record in records):
        own = "last_loss"  # without what is added to it
    elif (directory / "config.yaml").is_file() and _weighs(load_config(directory / "config.yaml").config):
        training = "training, as it is minimised"
    loss = {training: own, "held-out": "heldout/loss"}
    accuracy = {"held-out": "heldout/exact_match", "harder than trained": "harder/exact_match"}
    drawn = []
    for keys, label, name in ((loss, "loss (nats per token)", "loss"), (accuracy, "exact match", "accuracy")):
        curves = {kind: _curve(records, "step", key) for kind, key in keys.items()}
        if draw_curves(curves, "step", label, folder / f"{name}.png", top=1.02 if name == "accuracy" else None):
            drawn.append(folder / f"{name}.png")
    return drawn


def _weighs(config: Config) -> bool:
    """Whether the family's loss is more than the cross-entropy that is held out."""
    return type(build(config.model)).loss is not Family.loss


def heldout_curve(directory: Path, config: Config, name: str = "loss") -> Curve:
    """(tokens trained on, value) of a run's evaluations, also where no line of the log falls on their step.

    Args:
        name: loss, perplexity or exact_match.
    """
    tokens_of_step = config.training.batch_size * config.data.sequence_length
    steps = _curve(read_metrics(directory), "step", f"heldout/{name}")
    return [(step * tokens_of_step, value) for step, value in steps]


def draw_curves(curves: Mapping[str, Curve], x_label: str, y_label: str, path: Path, top: float | None = None) -> bool:
    """Draw labelled curves into a PNG; False, and no file, if all are empty.

    Args:
        top: the y axis goes from 0 to this; None fits it to the curves.
    """
    if not any(curves.values()):
        return False
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 30 else None, markersize=3)
    axes.set(xlabel=x_label, ylabel=y_label)
    if top is not None:
        axes.set_ylim(0, top)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _curve(records: Sequence[Mapping[str, float]], x: str, y: str) -> Curve:
    return [(record[x], record[y]) for record in records if x in record and y in record]
