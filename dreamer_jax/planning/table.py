"""Plans that `dreamer plan --json` wrote, as a Markdown table: `python -m dreamer_jax.planning.table PLAN.json ...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
HEADER = (
    "model",
    "topology",
    "mesh",
    "remat",
    "tokens a chip",
    "arguments",
    "temp",
    "total",
    "of the chip",
    "compiling, CPU s",
    "MFU at most",
)


def rows_of(plans: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row a plan; sizes in GiB."""
    return [_row(plan) for plan in plans]


def markdown(rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(files: Sequence[str]) -> int:
    """Print the table of these files, sorted by topology, then model."""
    plans = [json.loads(Path(file).read_text()) for file in files]
    plans.sort(key=lambda p: (p["topology"]["name"], p["model"]["variant"], p["model"]["depth"]))
    print(markdown(rows_of(plans)))
    return 0


def _row(plan: dict[str, Any]) -> list[str]:
    its, mesh = plan["compiled"], plan["mesh"]
    name = f"{plan['model']['variant']}/{plan['model']['depth']}"
    data = "x".join(map(str, mesh["data"])) + (f", expert {mesh['expert']}" if mesh["expert"] > 1 else "")
    start = [name, plan["topology"]["name"], data, plan["settings"]["remat"], f"{plan['tokens']['chip']:,}"]
    bound = f"{100 * plan['roofline']['mfu']:.1f} %"
    if not its["fits"]:
        return [*start, "", "", "does not fit", "", "", bound]
    sizes = [its["memory"]["arguments"], its["memory"]["temp"], its["total_bytes"]]
    share = f"{100 * its['total_bytes'] / its['chip_bytes']:.0f} %"
    return [*start, *(f"{size / GIB:.2f}" for size in sizes), share, f"{its['seconds']['compiling']:.0f}", bound]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
