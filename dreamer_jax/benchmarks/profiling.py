"""Where the time of a program goes: a trace that TensorBoard and Perfetto open, and its dearest operations.

jax's profiler writes what ran when; the compiled program's text says what each operation multiplies and touches. Both
together give an operation's rates, next to those that the machine can do.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.chips import chip_of
from dreamer_jax.errors import UserError
from dreamer_jax.planning.hlo import Computation, Instruction, Program, parse_program

TPU_LINE = "XLA Ops"
"""The line of a TPU's trace that has its operations; elsewhere events say themselves which they are (`hlo_op`)."""
_NAME = re.compile(r"%?([^\s=]+)")
"""Of an instruction; a TPU's events have the whole of it as their name, as `%fusion.2 = f32[8]{0} fusion(...)`."""
NOT_WORK = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"))
"""Operations that move no bytes of their own."""
# Products: `dot`; on a GPU calls of cuBLAS, which say it in their configuration; on a TPU convolutions, a batch of
# matrices being one over a grid with holes between them.
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CUBLAS = re.compile(r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
"""What a kernel says of itself."""
_KERNEL = re.compile(r"dim_labels=\w+?_(\w+?)->")
_TAPS = {name: re.compile(rf"window=\{{[^}}]*\b{name}=([\dx]+)") for name in ("size", "lhs_dilate")}


class Event(NamedTuple):
    """An operation that ran: when it started and how long it took, in nanoseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Rates:
    """What the machine can do: FLOP/s of products, bytes/s of its memory, and where these figures are from."""

    flops: float
    bandwidth: float
    origin: str


@dataclass(frozen=True)
class Cost:
    """One operation, per run of the program.

    Attributes:
        name: in the compiled program.
        origin: where in the traced program it comes from, "" where the compiler doesn't say.
        seconds: without those of operations within it (loops).
        share: of the seconds of all operations.
        count: how often it ran.
        flops, bytes: of its products, and of what it reads and writes; 0 where the program's text doesn't say.
        bound: share of its seconds that its products or its bytes, whichever takes longer, need at the machine's rates.
    """

    name: str
    origin: str
    seconds: float
    share: float
    count: float
    flops: float
    bytes: float
    bound: float


def profile(run: Callable[[], Any], text: str, folder: Path, runs: int = 3) -> tuple[list[Cost], Rates]:
    """Trace some runs of a compiled program.

    Args:
        run: runs it once and waits for its end; has run before.
        text: of the compiled program.
        folder: gets the trace, below plugins/profile.
        runs: how many are traced.
    Returns:
        Its operations, the dearest first, and what the machine can do.
    Raises:
        UserError: the trace can't be written, or has no operations.
    """
    rates = rates_of_machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with jax.profiler.trace(str(folder)):
            for _ in range(runs):
                run()
    except OSError as error:
        raise UserError(f"{folder}: no trace can be written there ({error})") from error
    newest = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    lines = operations_of(newest)
    if not lines:
        raise UserError(
            f"jax's profiler has recorded no operations on {jax.default_backend()}; {newest} is all there is"
        )
    return costs(lines, text, runs, rates), rates


def operations_of(trace: Path) -> list[list[Event]]:
    """The operations in a trace, by what they ran on (threads, streams, cores), those of a line in order.

    Those of the host are left out where a device has any: it only launches them.
    """
    found: dict[bool, list[list[Event]]] = {True: [], False: []}
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            if plane.name.startswith("/device:TPU") and line.name != TPU_LINE:
                continue  # the same again by modules and steps, and copies that run beside
            events = [(_operation(event, line.name), event) for event in line.events]
            its = [Event(name, event.start_ns, event.duration_ns) for name, event in events if name]
            if its:
                found[plane.name.startswith("/device:")].append(its)
    return found[True] or found[False]


def _operation(event: Any, line: str) -> str:
    """The operation's name in the compiled program; "" where the event is none."""
    for key, value in event.stats:
        if key == "hlo_op":  # on a GPU the event's own name is the kernel's
            return str(value)
    name = _NAME.match(event.name) if line == TPU_LINE else None
    return name[1] if name else ""


def own_seconds(line: Iterable[Event]) -> dict[str, tuple[float, int]]:
    """Name -> (seconds without those of events within its events, how many there were)."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    around: list[Event] = []
    for event in sorted(line, key=lambda event: (event.start, -event.duration)):
        while around and event.start >= around[-1].start + around[-1].duration:
            around.pop()
        if around:
            found[around[-1].name][0] -= event.duration
        found[event.name][0] += event.duration
        found[event.name][1] += 1
        around.append(event)
    return {name: (nanoseconds * 1e-9, int(count)) for name, (nanoseconds, count) in found.items()}


def costs(lines: Sequence[Iterable[Event]], text: str, runs: int, rates: Rates) -> list[Cost]:
    """The operations of all lines per run, the dearest first."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for line in lines:
        for name, (own, count) in own_seconds(line).items():
            seconds[name] += own / runs
            counts[name] += count
    program = parse_program(text)
    where = {each.name: (its, each) for its in program.computations.values() for each in its.instructions}
    total = sum(seconds.values())
    found = []
    for name, own in seconds.items():
        its = where.get(name)
        flops, moved = (flops_of(program, *its), bytes_of(*its)) if its else (0.0, 0.0)
        times = counts[name] / runs
        least = times * max(flops / rates.flops, moved / rates.bandwidth)
        origin = its[1].op_name if its else ""
        found.append(Cost(name, origin, own, own / total, times, flops, moved, least / own if own > 0 else 0.0))
    return sorted(found, key=lambda cost: -cost.seconds)


def flops_of(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Of an instruction's products, also of those fused into it; a loop has none, as its body runs by itself.

    A kernel's are those that it declares.
    """
    if instruction.opcode == "convolution":
        return 2.0 * math.prod(instruction.arrays[0].dims) * _taps(computation, instruction)
    contracted = (_CONTRACTED if instruction.opcode == "dot" else _CUBLAS).search(instruction.attributes)
    if instruction.opcode == "dot" or (instruction.opcode == "custom-call" and contracted):
        left = computation.by_name[instruction.operands[0]].arrays[0].dims
        axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])] if contracted else []
        return 2.0 * math.prod(instruction.arrays[0].dims) * math.prod(left[axis] for axis in axes)
    if instruction.opcode not in ("fusion", "custom-call"):
        return 0.0
    if estimate := _ESTIMATE.search(instruction.attributes):
        return float(estimate[1])
    inner = (program.computations.get(name) for name in instruction.all_called)
    return sum(flops_of(program, its, each) for its in inner if its for each in its.instructions)


def _taps(computation: Computation, convolution: Instruction) -> float:
    """How many products one number of the result is the sum of: input features, times places that the window meets."""
    labels = _KERNEL.search(convolution.attributes)
    assert labels is not None, convolution.attributes
    features = computation.by_name[convolution.operands[1]].arrays[0].dims[labels[1].index("i")]
    found = {name: pattern.search(convolution.attributes) for name, pattern in _TAPS.items()}
    size, holes = (math.prod(map(int, its[1].split("x"))) if its else 1 for its in found.values())
    return features * size / holes


def bytes_of(computation: Computation, instruction: Instruction) -> float:
    """Of an instruction's operands and results, each once: what it moves at least, if none of it is in a cache."""
    if instruction.opcode in NOT_WORK:
        return 0.0
    named = (computation.by_name[name] for name in instruction.operands if name in computation.by_name)
    return float(sum(array.bytes for each in (instruction, *named) for array in each.arrays))


def rates_of_machine() -> Rates:
    """Of the first device: from its data sheet, or measured."""
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is not None:
        return Rates(chip.peak_flops, chip.bandwidth, f"data sheet of {chip.name}, bfloat16")
    return _measured_rates()


@functools.cache
def _measured_rates() -> Rates:
    """By a product of 1,024 x 1,024 and by adding one to 256 MiB, float32: the best of five.

    Each gives its result to the next run in its own place: memory that is new to the process is several times slower,
    because the system has to find it first.
    """

    def best(function: Callable, x: jax.Array) -> float:
        compiled = jax.jit(function, donate_argnums=0)
        x = jax.block_until_ready(compiled(x))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            x = jax.block_until_ready(compiled(x))
            times.append(time.perf_counter() - began)
        return min(times)

    size, length = 1024, 1 << 26
    product = best(lambda x: x @ x, jnp.full((size, size), 1 / size))  # its own square
    passed = best(lambda x: x + 1, jnp.ones(length))
    return Rates(2 * size**3 / product, 2 * 4 * length / passed, "measured here, float32")


def table(found: Sequence[Cost], rates: Rates, most: int = 10) -> str:
    """The dearest operations as lines of text."""
    lines = [
        f"a step's operations take {sum(cost.seconds for cost in found):.3g} s on all threads or cores together; "
        f"the machine: {rates.flops / 1e9:,.0f} GFLOP/s, {rates.bandwidth / 1e9:,.0f} GB/s ({rates.origin})",
        f"{'share':>6} {'ms':>9} {'times':>7} {'GFLOP/s':>9} {'GB/s':>7} {'roofline':>9}  operation",
    ]
    for cost in found[:most]:
        flops, moved = (
            each * cost.count / cost.seconds / 1e9 if cost.seconds else 0 for each in (cost.flops, cost.bytes)
        )
        lines.append(
            f"{cost.share:6.1%} {cost.seconds * 1e3:9.3f} {cost.count:7,.0f} {flops:9,.1f} {moved:7,.1f} "
            f"{cost.bound:9.0%}  {cost.name}{f'  {_shortened(cost.origin)}' if cost.origin else ''}"
        )
    return "\n".join(lines)


def _shortened(origin: str, most: int = 60) -> str:
    return origin if len(origin) <= most else "..." + origin[-(most - 3) :]
