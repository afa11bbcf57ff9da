"""Trying meshes, microbatches and what is kept for the backward pass: ranked by roofline, the best ones compiled."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from dreamer_jax.budget import analytic, memory
from dreamer_jax.config import Config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.config.values import Remat
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import build
from dreamer_jax.planning.compiling import Compiled, compile_step
from dreamer_jax.planning.roofline import Roofline, roofline
from dreamer_jax.planning.step_cost import experts_on, scratch_bytes
from dreamer_jax.planning.topology import Topology
from dreamer_jax.training.work import deepest_of

GRADIENT_DEPTHS = (1, 4, 6, 8)
MOST_EXPERTS = 16
"""Largest expert axis that is tried."""
HOPELESS = 1.15
"""Of a chip's memory: candidates whose estimate is more come last. Compiled steps took an eighth less than that."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a configuration on a topology.

    Attributes:
        config: with its mesh and training settings.
        bound: its roofline; with the compiled program's collectives once `compiled`.
        estimate: bytes of HBM a chip will need, roughly.
        compiled: what the compiler said; None when it wasn't asked.
    """

    config: Config
    bound: Roofline
    estimate: float
    compiled: Compiled | None = None


def sweep(
    config: Config, topology: Topology, most: int = 3, progress: Callable[[str], None] = lambda _: None
) -> list[Candidate]:
    """The candidates, best first: those that were compiled and fit, then the others.

    Args:
        config: whose mesh, microbatches and rematerialisation are varied.
        topology: the chips.
        most: candidates to find that fit; as many again may be compiled in vain.
        progress: gets a line before each compilation.

    Raises:
        UserError: no candidate exists, e.g. because the batch has fewer rows than there are chips.
    """
    ranked = sorted(candidates(config, topology), key=lambda c: (_hopeless(c, topology), -c.bound.mfu))
    if not ranked:
        rows = config.training.batch_size
        raise UserError(f"training.batch_size: {rows} rows can't be divided over the {topology.chips} chips")
    fitting = 0
    for place, candidate in enumerate(ranked[: 2 * most]):
        if fitting == most:
            break
        progress(summary(candidate))
        compiled = compile_step(candidate.config, topology)
        bound = roofline(candidate.config, topology, compiled.collectives) if compiled.fits else candidate.bound
        ranked[place] = dataclasses.replace(candidate, bound=bound, compiled=compiled)
        fitting += compiled.fits
    return sorted(ranked, key=lambda c: (not (c.compiled and c.compiled.fits), bool(c.compiled), -c.bound.mfu))


def candidates(config: Config, topology: Topology) -> Iterator[Candidate]:
    """Every mesh of the topology with every setting that the batch allows."""
    for mesh, changes in itertools.product(meshes(topology), _settings(config)):
        try:
            training = dataclasses.replace(config.training, **changes)
            mesh = dataclasses.replace(mesh, exchange=config.mesh.exchange)
            changed = dataclasses.replace(config, mesh=mesh, training=training)
        except ConfigError:
            continue  # rows that don't divide, or more chips than experts
        yield Candidate(changed, roofline(changed, topology), estimate(changed, topology.chip.name))


def meshes(topology: Topology) -> list[MeshConfig]:
    """The torus axes as they are, and with the last ones cut off for the experts."""
    found = []
    for expert in (2**power for power in range(int(math.log2(MOST_EXPERTS)) + 1)):
        sides, left = list(topology.shape), expert
        while left > 1 and sides:
            taken = math.gcd(left, sides[-1])
            if taken == 1:
                break
            left //= taken
            sides[-1] //= taken
            if sides[-1] > 1:
                break
            sides.pop()
        if left == 1:
            found.append(MeshConfig(slices=topology.slices, data=tuple(sides) or (1,), expert=expert))
    return found


def summary(candidate: Candidate) -> str:
    """One line: the mesh, the settings, the bound."""
    mesh, training = candidate.config.mesh, candidate.config.training
    return (
        f"data {'x'.join(map(str, mesh.data))}, expert {mesh.expert}, microbatches {training.microbatches}, "
        f"remat {training.remat}, gradient_depths {training.gradient_depths}: "
        f"at most {100 * candidate.bound.mfu:.1f} % MFU"
    )


def _settings(config: Config) -> Iterator[dict]:
    """Those that the configuration has are among them: where it fits as it is, something is found."""
    training, tried = config.training, GRADIENT_DEPTHS
    powers = [2**power for power in range(4) if training.batch_size % 2**power == 0]
    microbatches = sorted({training.microbatches, *powers})
    if not any(experts_on(config, "")):
        tried = (training.gradient_depths,)  # it is about experts: every number is the same program
    elif training.gradient_depths:
        tried = tuple(sorted({training.gradient_depths, *tried}))
    for microbatch, policy, depths in itertools.product(microbatches, get_args(Remat), tried):
        yield {"microbatches": microbatch, "remat": policy, "gradient_depths": depths}


def estimate(config: Config, chip: str) -> float:
    """Bytes of HBM: the state, a copy of the weights and their gradients, and what is kept for the backward pass.

    The experts' rows have room for whatever the router does: under expert parallelism, for those of the whole group.
    """
    model, training = build(config.model), config.training
    whole = analytic.total(analytic.parameters(model))
    own = whole - analytic.expert_parameters(model) * (1 - 1 / config.mesh.expert)
    rows = training.batch_size // (config.mesh.size * training.microbatches)
    kept = memory.activations(model, config.data.places, rows, training.remat, deepest_of(config))
    state = 12 * whole / (config.mesh.size // config.mesh.slices)
    return state + 6 * own + kept + scratch_bytes(config, chip)


def _hopeless(candidate: Candidate, topology: Topology) -> bool:
    return candidate.estimate > HOPELESS * topology.chip.memory
