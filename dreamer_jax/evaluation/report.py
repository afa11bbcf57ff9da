"""Results of evaluations as a table for people."""

from __future__ import annotations

from typing import Any

from dreamer_jax.evaluation.runner import Results

HEADER = ("task", "metric", "value", "standard error", "questions")


def table(results: Results) -> str:
    """One line a metric; shares in per cent, perplexities as they are. Subjects stand under their task."""
    rows: list[tuple[str, ...]] = [HEADER]
    for label, result in results.items():
        amount = f"{result['questions']:,}"
        rows += [(label, name, *_cells(name, number), amount) for name, number in result["metrics"].items()]
        for subject, metrics in result.get("subjects", {}).items():
            rows += [(f"  {subject}", name, *_cells(name, number), "") for name, number in list(metrics.items())[:1]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        lines.append("  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for cell, w, i in cells).rstrip())
    return "\n".join(lines)


def _cells(name: str, number: dict[str, Any]) -> tuple[str, str]:
    value, error = number["value"], number["standard_error"]
    if name.endswith("perplexity"):
        return f"{value:,.3f}", "-" if error is None else f"{error:,.3f}"
    return f"{value:.2%}", "-" if error is None else f"{error:.2%}"
