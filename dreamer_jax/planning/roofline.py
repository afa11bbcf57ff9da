"""How fast a train step could be at best on a slice: matrix units, HBM and wires, each operation at its tightest.

The bound is the sum over operations of the longer of (matrix time, HBM time), and the time of the collectives that
nothing hides. Matrix time counts whole tiles: partly filled blocks, or halves, of an expert's rows and dimensions that
aren't multiples of 128. HBM time counts the arrays that each operation reads and writes, once. What isn't counted:
vector work (softmax, top-k, SwiGLU), latencies, imbalance between experts or chips. So a real step is slower: it is a
bound, not a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, Operation
from dreamer_jax.budget import analytic
from dreamer_jax.config import Config
from dreamer_jax.families import build
from dreamer_jax.parallel.gather import SCATTER
from dreamer_jax.parallel.mesh import EXPERT, RING, SLICE, collective_axes
from dreamer_jax.planning.collectives import Collective
from dreamer_jax.planning.step_cost import (
    applications,
    experts_on,
    neurons_on,
    operations,
    rows_per_expert,
    share_of_tiles,
)
from dreamer_jax.planning.topology import Topology
from dreamer_jax.planning.torus import Wires
from dreamer_jax.training.work import work_of


@dataclass(frozen=True)
class Term:
    """One operation of a step on one chip: FLOPs of whole tiles, bytes of HBM, and the times they take."""

    name: str
    flops: float
    bytes: float
    matrix_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.matrix_seconds, self.memory_seconds)


@dataclass(frozen=True)
class Exchange:
    """Collectives of one purpose in a step: bytes a chip, seconds, and whether other work hides them."""

    name: str
    bytes: float
    seconds: float
    hidden: bool = False


@dataclass(frozen=True)
class Roofline:
    """The bound of one configuration on one topology.

    Attributes:
        terms, exchanges: what it is made of.
        seconds: of a step, at least.
        mfu: model FLOPs utilisation, at most.
        tokens_per_second: of the text, a chip, at most.
        rows_per_expert: of one matrix product, on average.
        tile_share: part of the experts' matrix tiles that is filled.
        compiled: whether the collectives are those of the compiled program.
    """

    terms: tuple[Term, ...]
    exchanges: tuple[Exchange, ...]
    seconds: float
    mfu: float
    tokens_per_second: float
    rows_per_expert: float
    tile_share: float
    compiled: bool

    def total(self, kind: str) -> float:
        """Seconds of all matrix products, of all HBM traffic, or of all exchanges that aren't hidden."""
        if kind == "collective":
            return sum(e.seconds for e in self.exchanges if not e.hidden)
        return sum(getattr(term, f"{kind}_seconds") for term in self.terms)


def roofline(config: Config, topology: Topology, collectives: Sequence[Collective] | None = None) -> Roofline:
    """The bound of a configuration.

    Args:
        config: its mesh takes every chip of the topology.
        topology: the chips.
        collectives: those of the compiled program; None estimates them from the configuration.
    """
    chip = topology.chip
    terms = tuple(_term(operation, topology) for operation in operations(config, chip.name))
    wires = Wires(config.mesh, topology)
    exchanges = _expected(config, wires) if collectives is None else _compiled(config, collectives, wires)
    seconds = sum(term.seconds for term in terms) + sum(e.seconds for e in exchanges if not e.hidden)
    tokens = config.training.batch_size * config.data.sequence_length / topology.chips
    places = config.data.copies * tokens
    useful = analytic.training_flops(build(config.model), config.data.places, work_of(config))[0] * places
    return Roofline(
        terms,
        exchanges,
        seconds,
        useful / (chip.peak_flops * seconds),
        tokens / seconds,
        rows_per_expert(config),
        share_of_tiles(config, chip.name),
        collectives is not None,
    )


def _term(operation: Operation, topology: Topology) -> Term:
    chip = topology.chip
    matrix, memory = operation.flops / chip.peak_flops, operation.bytes / chip.bandwidth
    return Term(operation.name, operation.flops, operation.bytes, matrix, memory)


def _compiled(config: Config, collectives: Sequence[Collective], wires: Wires) -> tuple[Exchange, ...]:
    """The program's collectives by purpose. How often a loop turns may not be written there, such as one over a number
    of depths that is drawn; the experts' exchange is then estimated."""
    found: dict[tuple[str, bool], list[float]] = {}
    scattered_in_loops = config.training.scatter == "microbatch"
    unknown = any(one.times is None for one in collectives)
    for one in collectives:
        if one.loops and not (scattered_in_loops and "f32" in one.arrays[0]):
            name = "expert exchange"
        elif one.kind in ("all-gather", "all-to-all") and "bf16" in one.arrays[0] and SCATTER not in one.op_name:
            name = "weight gather"
        else:
            name = "gradient scatter"
        if one.times is not None and not (unknown and name == "expert exchange"):
            sums = found.setdefault((name, one.overlapped and one.kind == "all-gather"), [0.0, 0.0])
            sums[0] += one.bytes * one.times
            sums[1] += wires.seconds(one.kind, one.bytes, one.axes) * one.times
    exchanges = [Exchange(name, sums[0], sums[1], hidden) for (name, hidden), sums in sorted(found.items())]
    return (*exchanges, *([_expert_exchange(config, wires)] if unknown else []))


def _expected(config: Config, wires: Wires) -> tuple[Exchange, ...]:
    """What the train step will send: each weight once, each gradient once or once a microbatch, and the experts'
    exchange at every depth."""
    gathered = _weights_over_axes(config, wires, lambda axes: ("all-gather", 2))
    scattered = _weights_over_axes(config, wires, lambda axes: _scattering(config, wires, axes))
    times = config.training.microbatches if config.training.scatter == "microbatch" else 1
    scatter = Exchange("gradient scatter", scattered[0] * times, scattered[1] * times)
    exchanges = [Exchange("weight gather", *gathered), scatter]
    if config.mesh.expert > 1:
        exchanges.append(_expert_exchange(config, wires))
    if config.mesh.slices > 1:
        parameters = analytic.total(analytic.parameters(build(config.model)))
        share = 4 * parameters / (config.mesh.size // config.mesh.slices)
        seconds = wires.seconds("all-reduce", share, [SLICE]) * times
        exchanges.append(Exchange("between slices", share * times, seconds))
    return tuple(exchange for exchange in exchanges if exchange.seconds)


def _scattering(config: Config, wires: Wires, axes: tuple[str, ...]) -> tuple[str, int]:
    """The collective that sums gradients along axes, as HLO calls it, and bytes of a number in it."""
    narrow = config.training.scatter_dtype == "bfloat16" and all(wires.sizes[axis] <= RING for axis in axes)
    return ("all-to-all", BFLOAT16_BYTES) if narrow else ("reduce-scatter", FLOAT32_BYTES)


def _weights_over_axes(
    config: Config, wires: Wires, how: Callable[[tuple[str, ...]], tuple[str, int]]
) -> tuple[float, float]:
    """(bytes, seconds) of gathering or scattering every weight once, as the step does; `how` says by what collective it
    goes along axes, in how many bytes a number."""
    family = build(config.model)
    experts = analytic.expert_parameters(family) / config.mesh.expert
    others = analytic.total(analytic.parameters(family)) - analytic.expert_parameters(family)
    size = seconds = 0.0
    for numbers, among_experts in ((experts, False), (others, True)):
        for axes, devices in collective_axes(wires.sizes).items():
            if among_experts or axes != (EXPERT,):
                kind, width = how(axes)
                size += numbers * width
                seconds += wires.seconds(kind, numbers * width, axes)
                numbers /= devices
    return size, seconds


def _expert_exchange(config: Config, wires: Wires) -> Exchange:
    """Tokens to the chips of their experts and the sums back, at every depth: forward, again for remat, and backward.

    gather: all tokens of a group to all its chips. ragged: each choice to the chip of its expert. A layer that is
    computed again does both again; remat "attention" keeps what was gathered, and not what was sent.
    """
    moved = seconds = 0.0
    for block, on, share in experts_on(config, ""):
        ragged = config.mesh.exchange == "ragged"
        copies, kind = (block.router.selected, "all-to-all") if ragged else (on.group, "all-gather")
        size = copies * on.tokens * config.training.microbatches * block.hidden_size * BFLOAT16_BYTES
        times = (4 + 2 * on.again.products + (on.again.gate and ragged)) * applications(config, share)[0]
        moved += size * times
        seconds += wires.seconds(kind, size, [EXPERT]) * times
    for block, on, share in neurons_on(config):
        size = on.group * on.tokens * config.training.microbatches * block.hidden_size * BFLOAT16_BYTES
        forward, backward = applications(config, share)
        times = 2 * forward + (2 + 2 * on.again.cheap) * backward
        moved += size * times
        seconds += wires.seconds("all-gather", size, [EXPERT]) * times
    return Exchange("expert exchange", moved, seconds)
