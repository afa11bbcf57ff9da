"""What stands between a configuration and a faster step: the terms of its bound in order, and what would shorten each.

What would is found by trying: every setting that a person could change alone, here, and the roofline of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from dreamer_jax.budget.report import table
from dreamer_jax.config import Config
from dreamer_jax.config.values import Remat
from dreamer_jax.errors import ConfigError
from dreamer_jax.planning.roofline import Roofline, roofline
from dreamer_jax.planning.step_cost import gradient_depths
from dreamer_jax.planning.sweep import GRADIENT_DEPTHS, estimate, meshes
from dreamer_jax.planning.topology import Topology

WORTH_SAYING = 0.02
"""Of a term's time: a change that saves less isn't named."""


@dataclass(frozen=True)
class Change:
    """One setting changed, all else as it is.

    Attributes:
        text: as one would write it on the command line.
        bound: the roofline with it.
        memory: bytes of HBM that a chip would need, roughly.
    """

    text: str
    bound: Roofline
    memory: float


@dataclass(frozen=True)
class Reason:
    """One term of the bound.

    Attributes:
        name: of the operation, or of the collectives.
        seconds: of a step.
        share: of the step's.
        limit: what it waits for: "matrix units", "HBM" or "wires".
        mfu_without: the bound if it took no time.
        change: of those that fit, if any does, the one that shortens it most; None if none does.
        seconds_then: with that change.
    """

    name: str
    seconds: float
    share: float
    limit: str
    mfu_without: float
    change: Change | None
    seconds_then: float


def explain(config: Config, topology: Topology) -> list[Reason]:
    """The terms of a configuration's bound, the longest first, from estimated collectives.

    Args:
        config: its mesh takes every chip of the topology.
        topology: the chips.
    """
    bound, changed = roofline(config, topology), list(changes(config, topology))
    found = []
    for name, (seconds, limit) in _times(bound).items():
        after = {change: _times(change.bound).get(name, (0.0,))[0] for change in changed}
        helping = [change for change in changed if after[change] < (1 - WORTH_SAYING) * seconds]
        room = topology.chip.memory
        best = min(helping, key=lambda its: (its.memory > room, after[its], -its.bound.mfu), default=None)
        found.append(
            Reason(
                name,
                seconds,
                seconds / bound.seconds,
                limit,
                bound.mfu * bound.seconds / (bound.seconds - seconds),
                best,
                seconds if best is None else after[best],
            )
        )
    return sorted(found, key=lambda reason: -reason.seconds)


def changes(config: Config, topology: Topology) -> Iterator[Change]:
    """Every setting of training and mesh that can be changed alone, with the roofline that it gives."""
    training, mesh = config.training, config.mesh
    now = {"gradient_depths": gradient_depths(config, topology.chip.name)}
    tried: list[tuple[str, dict[str, Any]]] = [
        (f"--mesh.data {','.join(map(str, its.data))} --mesh.expert {its.expert}", {"mesh": its})
        for its in meshes(topology)
    ]
    if mesh.expert > 1:
        tried += [(f"--mesh.exchange {kind}", {"exchange": kind}) for kind in ("gather", "ragged")]
    settings: dict[str, tuple[Any, ...]] = {
        "microbatches": (1, 2, 4, 8),
        "remat": get_args(Remat),
        "gradient_depths": GRADIENT_DEPTHS,
        "scatter": ("step", "microbatch"),
        "scatter_dtype": ("float32", "bfloat16"),
    }
    for name, values in settings.items():
        of_now = now.get(name, getattr(training, name))
        tried += [(f"--training.{name} {value}", {name: value}) for value in values if value != of_now]
    for text, change in tried:
        try:
            if "mesh" in change:
                changed = dataclasses.replace(config, mesh=dataclasses.replace(change["mesh"], exchange=mesh.exchange))
            elif "exchange" in change:
                changed = dataclasses.replace(config, mesh=dataclasses.replace(mesh, **change))
            else:
                changed = dataclasses.replace(config, training=dataclasses.replace(training, **change))
        except ConfigError:
            continue  # rows that don't divide, or more chips than experts
        if changed != config:
            yield Change(text, roofline(changed, topology), estimate(changed, topology.chip.name))


def render(reasons: list[Reason], topology: Topology) -> str:
    """The table, for a person."""
    rows = []
    for its in reasons:
        helped = ["nothing that can be set", "", ""]
        if its.change is not None:
            room = its.change.memory / topology.chip.memory
            text = its.change.text + (f" ({100 * room:.0f} % of HBM)" if room > 1 else "")
            helped = [text, f"{1e3 * its.seconds_then:.1f}", f"{100 * its.change.bound.mfu:.1f}"]
        numbers = [f"{1e3 * its.seconds:.1f}", f"{100 * its.share:.0f}", its.limit, f"{100 * its.mfu_without:.1f}"]
        rows.append([its.name, *numbers, *helped])
    header = ["what bounds the step", "ms", "%", "waits for", "MFU % without it"]
    text = table([*header, "shortened most by", "ms then", "MFU % then"], rows)
    return (
        f"{text}\n\nEach change alone, collectives estimated. What shortens one term may lengthen others: the last "
        "column is the bound of all. `--sweep` tries changes together."
    )


def as_data(reasons: list[Reason]) -> list[dict[str, Any]]:
    """The same as plain data."""
    found = []
    for its in reasons:
        change = None
        if its.change is not None:
            change = {"set": its.change.text, "mfu": its.change.bound.mfu, "estimated_bytes": its.change.memory}
        found.append({**dataclasses.asdict(dataclasses.replace(its, change=None)), "change": change})
    return found


def _times(bound: Roofline) -> dict[str, tuple[float, str]]:
    """Name of a term -> (seconds, what it waits for); what other work hides takes none."""
    times = {
        term.name: (term.seconds, "matrix units" if term.matrix_seconds >= term.memory_seconds else "HBM")
        for term in bound.terms
    }
    return times | {its.name: (its.seconds, "wires") for its in bound.exchanges if not its.hidden}
