"""What a study will cost: FLOPs from the counters, time from a few steps on this machine or from a slice's roofline."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import jax
from jax.sharding import NamedSharding

from dreamer_jax.budget.report import table
from dreamer_jax.config import Config
from dreamer_jax.config.loading import Word
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.data import open_data
from dreamer_jax.errors import UserError
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.parallel.distributed import place_rows, rows_of_devices
from dreamer_jax.planning.roofline import roofline
from dreamer_jax.planning.topology import Topology, parse_topology
from dreamer_jax.studies.entrants import Entrant, describe, entrants, warnings
from dreamer_jax.studies.study import FIRST
from dreamer_jax.studies.study_file import TRIAL_SHARE, StudyFile
from dreamer_jax.training.state import create_state
from dreamer_jax.training.train_step import make_train_step

TIMED = 3
"""Steps that are timed, after one that isn't."""


def plan(study: StudyFile, words: Sequence[Word], slice_name: str | None, say: Callable[[str], None]) -> str:
    """A table: what each member costs, and the whole study.

    Args:
        study, words: see `entrants`.
        slice_name: a TPU slice, whose roofline bounds the time from below; None: this machine, on which every member
            does a few steps. Evaluation and compilation aren't counted.
        say: gets a line for each member that is timed.
    """
    topology = None if slice_name is None else parse_topology(slice_name, 1)
    runs = len(study.run_seeds) + (study.sweep.share * len(study.sweep.values) if study.sweep else 0.0)
    runs -= study.sweep is not None and study.sweep.share == 1 and FIRST in study.run_seeds  # it is one of the sweep's
    runs += TRIAL_SHARE * study.seeds * study.tries if study.tries > 1 else 0.0
    rows, flops, seconds = [], 0.0, 0.0
    every = entrants(study, words)
    for entrant in every:
        about, config = describe(entrant), entrant.loaded.config
        name = f"{entrant.task.name}/{entrant.member.name}"
        if topology is None:
            say(f"timing {name} ...")
        step = seconds_of_step(config) if topology is None else _bound(entrant, topology)
        its_flops = runs * about["training_flops_per_token"] * about["tokens"]
        its_seconds = runs * step * config.training.steps
        gaps = about.get("gaps_percent", {})
        rows.append(
            [
                name,
                about["headline"],
                f"{about['parameters']:,}",
                *(f"{gaps[key]:+.2f} %" if key in gaps else "-" for key in ("params", "flops_per_token")),
                f"{its_flops:.2e}",
                _time(its_seconds),
            ]
        )
        flops, seconds = flops + its_flops, seconds + its_seconds
    where = "this machine, one run at a time" if topology is None else f"{topology.name} at best, by the roofline"
    whole = f"{runs:g} runs of each: {flops:.2e} training FLOPs, {_time(seconds)} of training on {where}"
    titles = ["run", "model", "parameters", "gap", "FLOPs gap", "training FLOPs", "time"]
    return "\n".join([table(titles, rows), "", *warnings(every, study.baseline), whole])


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else str(timedelta(seconds=round(seconds)))


def seconds_of_step(config: Config) -> float:
    """The median of a few train steps on the configuration's own data."""
    mesh = make_mesh(config.mesh)
    sharding = NamedSharding(mesh, batch_spec(mesh))
    size = config.training.batch_size
    rows = rows_of_devices(size, sharding)
    batches = open_data(config).training_batches(0, 1 + TIMED, rows)
    step, state, taken = make_train_step(config, mesh), create_state(config, mesh), []
    for _, batch in batches:
        placed = place_rows(batch, rows, size, sharding)
        began = time.perf_counter()
        state, _ = step(state, placed)
        jax.block_until_ready(state)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _bound(entrant: Entrant, topology: Topology) -> float:
    config = entrant.loaded.config
    if config.training.batch_size % topology.chips:
        raise UserError(
            f"{topology.name} has {topology.chips} chips, and training.batch_size {config.training.batch_size} can't "
            "be divided among them; name a smaller slice"
        )
    mesh = MeshConfig(slices=topology.slices, data=topology.shape)
    return roofline(dataclasses.replace(config, mesh=mesh), topology, None).seconds
