"""What a trained model's held-out loss becomes when it runs at other depths than the trained one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.data import open_data
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.runs.folders import write_atomically
from dreamer_jax.runs.models import load_run
from dreamer_jax.training.evaluation import evaluate
from dreamer_jax.training.train_step import make_evaluation_step

FILE = "depth.json"
FARTHEST = 4
"""Times the trained depth, up to which models are run that take any depth."""

ByDepth = dict[int, dict[str, float]]
"""Depth -> loss, perplexity, and exact match where answers are known."""


def by_depth(run: Path, depths: Sequence[int] | None, say: Callable[[str], None]) -> ByDepth:
    """Held-out metrics of a run's newest checkpoint at these depths, written to `FILE` in it.

    What the file has of the same checkpoint isn't computed again. One device does it.

    Args:
        run: a run directory.
        depths: by default the powers of two up to `FARTHEST` times the trained depth, and that one.
        say: gets a line for each depth.

    Raises:
        UserError: the model can't be run at one of them, or nothing is held out.
    """
    model = load_run(run)
    config = model.config
    asked = usual_depths(model.family) if depths is None else sorted(set(depths))
    for depth in asked:
        model.family.check_depth(depth)
    file = run / FILE
    known = _read(file, model.step)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    sharding = NamedSharding(mesh, batch_spec(mesh))
    data = open_data(config)
    for depth in asked:
        if depth not in known:
            metrics, _ = evaluate(
                make_evaluation_step(config, mesh, depth), lambda batch: jax.device_put(batch, sharding), model, data
            )
            kept = {name.removeprefix("heldout/"): value for name, value in metrics.items() if "heldout/" in name}
            if not kept:
                raise UserError(f"{run} has no held-out records; see data.heldout_records and data.heldout_path")
            known[depth] = kept
            written = {"step": model.step, "depths": {str(d): known[d] for d in sorted(known)}}
            write_atomically(file, json.dumps(written, indent=1) + "\n")
        say(f"depth {depth}: " + ", ".join(f"{name} {value:.4f}" for name, value in known[depth].items()))
    return {depth: known[depth] for depth in asked}


def usual_depths(family: Family) -> list[int]:
    """1, 2, 4, ... and the trained depth; beyond it only where the model takes any depth."""
    found = {family.depth}
    depth = 1
    while depth <= FARTHEST * family.depth:
        if depth == family.depth or takes(family, depth):
            found.add(depth)
        depth *= 2
    return sorted(found)


def takes(family: Family, depth: int) -> bool:
    """Whether a model can be run at a depth."""
    try:
        family.check_depth(depth)
    except UserError:
        return False
    return True


def _read(file: Path, step: int) -> ByDepth:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return {int(depth): its for depth, its in content["depths"].items()} if content["step"] == step else {}
