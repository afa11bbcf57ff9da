"""`dreamer bench kernels`: the kernels' times, predicted for a TPU topology without a TPU, or measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive, say


def run(arguments: list[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = Parser(
        prog="dreamer bench kernels",
        description="Each kernel at the paper's shapes next to XLA: predicted from the compiler's static schedule and "
        "the bytes it moves (--topology, extra tpu, no TPU needed), or measured on this machine's accelerator.",
        epilog="What the columns mean: docs/kernels.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--topology", metavar="NAME", help="predict for a chip of it, such as v5p:2x2x1")
    parser.add_argument("--match", metavar="TEXT", default="", help="only kernels whose name or shape contains this")
    parser.add_argument("--repeats", type=positive, default=10, metavar="N", help="runs to measure (10)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args(arguments)

    from dreamer_jax.benchmarks import kernels

    if options.topology:
        from dreamer_jax.planning.topology import parse_topology

        rows = kernels.predict(parse_topology(options.topology), options.match, say)
    else:
        rows = kernels.measure(options.match, options.repeats, say)
    print(json.dumps(rows, indent=2) if options.json else "\n".join([*_lines(rows), *_notes(rows)]))
    return 0


def _lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = ["kernel", "shape", "ms", "compute", "memory", "roofline", "ratio", "XLA", "XLA/ours", "temp MiB"]
    table = [columns] + [_cells(row) for row in rows]
    widths = [max(len(line[n]) for line in table) for n in range(len(columns))]
    texts = 2
    return [
        "  ".join(
            cell.ljust(width) if n < texts else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each row that has more to say, below the table."""
    notes = []
    for row in rows:
        texts = [f"{name} {value:.3g}" for name, value in row.get("figures", {}).items()]
        if "xla_error" in row:
            texts.append(f"XLA: {row['xla_error']}")
        if texts:
            notes.append(f"{row['name']}, {row['shape']}: {'; '.join(texts)}")
    return notes


def _cells(row: dict[str, Any]) -> list[str]:
    def milliseconds(key: str) -> str:
        return f"{1e3 * row[key]:.3f}" if key in row else ""

    ratio = f"{row['seconds'] / row['roofline_seconds']:.2f}" if row.get("roofline_seconds") else ""
    return [
        row["name"],
        row["shape"],
        milliseconds("seconds"),
        milliseconds("compute_seconds"),
        milliseconds("memory_seconds"),
        milliseconds("roofline_seconds"),
        ratio,
        milliseconds("xla_seconds"),
        f"{row['xla_seconds'] / row['seconds']:.2f}" if "xla_seconds" in row else "",
        f"{row['temporary'] / 2**20:.1f}" if "temporary" in row else "",
    ]
