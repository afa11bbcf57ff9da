"""Curves of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from dreamer_jax.training.metrics import read_metrics


def draw_figures(directory: Path) -> list[Path]:
    """Write figures/loss.png, and figures/accuracy.png where exact match was measured; returns their paths."""
    records = read_metrics(directory)
    folder = directory / "figures"
    folder.mkdir(exist_ok=True)
    loss = {"training": "loss", "held-out": "heldout/loss"}
    accuracy = {"held-out": "heldout/exact_match", "harder than trained": "harder/exact_match"}
    paths = [_draw(records, loss, "loss (nats per token)", folder / "loss.png")]
    paths.append(_draw(records, accuracy, "exact match", folder / "accuracy.png"))
    return [path for path in paths if path is not None]


def _draw(records: list[dict[str, float]], curves: dict[str, str], label: str, path: Path) -> Path | None:
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, key in curves.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 30 else None, markersize=3)
    drawn = bool(axes.lines)
    if drawn:
        axes.set(xlabel="step", ylabel=label)
        if "match" in label:
            axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path if drawn else None
