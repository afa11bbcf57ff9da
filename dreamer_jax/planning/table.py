"""The plans of the paper's six models on three slices: compiled, kept as JSON, shown as a Markdown table.

`python -m dreamer_jax.planning.table FOLDER` compiles what FOLDER lacks (three CPU-minutes each) and prints the table;
`python -m dreamer_jax.planning.table PLAN.json ...` prints that of files that `dreamer plan --json` wrote.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.config import load_config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.planning.compiling import compile_step
from dreamer_jax.planning.report import describe
from dreamer_jax.planning.roofline import roofline
from dreamer_jax.planning.topology import parse_topology

MODELS = ("dr_da_32", "dr_32", "la_32", "dr_da_16", "dr_16", "la_16")
MESHES = {
    "v5p:4x4x4": MeshConfig(data=(4, 4, 2), expert=2),
    "v5e:16x16": MeshConfig(data=(16, 4), expert=4),
    "v4:4x4x4": MeshConfig(data=(4, 4, 2), expert=2),
}
"""Topology -> the mesh with the least memory of a step that computes everything again in the backward pass."""
GIB = 1 << 30
HEADER = (
    "model",
    "topology",
    "mesh",
    "remat",
    "tokens a chip",
    "arguments",
    "temp",
    "temp as reported",
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


def main(words: Sequence[str]) -> int:
    """Print the table of these files or of a folder, sorted by topology, then model."""
    paths = [Path(word) for word in words]
    if len(paths) == 1 and paths[0].suffix != ".json":
        paths = compile_missing(paths[0])
    plans = [json.loads(path.read_text()) for path in paths]
    plans.sort(key=lambda p: (p["topology"]["name"], p["model"]["variant"], p["model"]["depth"]))
    print(markdown(rows_of(plans)))
    return 0


def compile_missing(folder: Path) -> list[Path]:
    """The plans of all models and topologies; those that the folder lacks are compiled, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, mesh in MESHES.items():
        topology = parse_topology(name)
        for model in MODELS:
            path = folder / f"{model}_{topology.chip.name}.json"
            paths.append(path)
            if path.exists():
                continue
            print(f"compiling {model} for {name}", file=sys.stderr, flush=True)
            config = dataclasses.replace(load_config(model).config, mesh=mesh)
            training = dataclasses.replace(config.training, gradient_depths=1)
            config = dataclasses.replace(config, training=training)
            compiled = compile_step(config, topology)
            plan = describe(config, topology, compiled, roofline(config, topology, compiled.collectives))
            path.write_text(json.dumps(plan))
    return paths


def _row(plan: dict[str, Any]) -> list[str]:
    its, mesh = plan["compiled"], plan["mesh"]
    name = f"{plan['model']['variant']}/{plan['model']['depth']}"
    data = "x".join(map(str, mesh["data"])) + (f", expert {mesh['expert']}" if mesh["expert"] > 1 else "")
    start = [name, plan["topology"]["name"], data, plan["settings"]["remat"], f"{plan['tokens']['chip']:,}"]
    bound = f"{100 * plan['roofline']['mfu']:.1f} %"
    if not its["fits"]:
        return [*start, "", "", "", "does not fit", "", "", bound]
    memory = its["memory"]
    sizes = [memory["arguments"], memory["temp"], memory.get("reported_temp", memory["temp"]), its["total_bytes"]]
    share = f"{100 * its['total_bytes'] / its['chip_bytes']:.0f} %"
    return [*start, *(f"{size / GIB:.2f}" for size in sizes), share, f"{its['seconds']['compiling']:.0f}", bound]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
