"""Memory of a compiled step: the compiler's own totals, and which values are alive at the fullest moment.

Arguments and results are `memory_analysis()`'s, exact. Temporaries are the one block that the compiler reserves for
them in HBM, read from its buffer assignment: libtpu's `memory_analysis()` reports that block and, a second time, the
part of it that it takes for fragmentation (a program whose temp so reported exceeds the chip may compile and fit). The
values are read from the scheduled program by following who is used last where.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from dreamer_jax.planning.hlo import Computation, Instruction, Program, arrays_of, elements_of

Value = Any
"""What an instruction returns: the number of a buffer, or a tuple of values."""
_ALIASES = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_WRAPPERS = re.compile(r"jit\(\w+\)|shard_map|closed_call|while|body|checkpoint|rematted_computation|vmap\(\)")


@dataclass(frozen=True)
class Buffer:
    """One array that lies in HBM at the fullest moment.

    Attributes:
        name: where in the traced program it is made, e.g. "expert_attention/dot_general".
        array: e.g. "bf16[1097,944,1024]".
        bytes: in memory, padded.
        count: how many such arrays.
        loop: whether it is made in a loop's body.
    """

    name: str
    array: str
    bytes: int
    count: int
    loop: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def reserved_bytes(assignment: str) -> int | None:
    """Bytes of HBM that a buffer assignment, as XLA dumps it, reserves for temporaries; None if it doesn't say."""
    sizes = re.findall(r"^\s*allocation \d+: size (\d+),(?: page \d+,)? preallocated-temp", assignment, re.MULTILINE)
    return sum(map(int, sizes)) if sizes else None


def largest_buffers(program: Program, at_most: int = 12) -> list[Buffer]:
    """The largest values alive at the fullest moment of the step, arguments and results apart."""
    _, alive = _peak(program, program.entry, {}, in_loop=False)
    grouped: dict[tuple[str, str, bool], list[int]] = {}
    for instruction, array, size, in_loop in alive:
        grouped.setdefault((_where(instruction), array, in_loop), []).append(size)
    found = [Buffer(n, array, sum(sizes), len(sizes), loop) for (n, array, loop), sizes in grouped.items()]
    return sorted(found, key=lambda b: -b.bytes)[:at_most]


def peak_bytes(program: Program) -> int:
    """Bytes of all values alive at the fullest moment, to compare with the compiler's total."""
    return _peak(program, program.entry, {}, in_loop=False)[0]


Alive = list[tuple[Instruction, str, int, bool]]


def _peak(program: Program, name: str, known: dict[str, tuple[int, Alive]], in_loop: bool) -> tuple[int, Alive]:
    """(bytes, the values) of a computation's own at its fullest moment, with those of the computations it runs."""
    if name in known:
        return known[name]
    computation = program.computations[name]
    flow = _Flow(program, computation)
    alive: dict[int, tuple[Instruction, str, int, bool]] = {}
    size, best, snapshot = 0, -1, []
    for position, instruction in enumerate(computation.instructions):
        for number in flow.made[position]:
            array = flow.buffers[number]
            alive[number] = (instruction, str(array), array.padded_bytes, in_loop)
            size += array.padded_bytes
        inner, values = 0, []
        for called in _run_by(instruction):
            if called in program.computations:
                loop = in_loop or instruction.opcode == "while"
                inner, values = max((inner, values), _peak(program, called, known, loop), key=lambda pair: pair[0])
        if size + inner > best:
            best, snapshot = size + inner, [*alive.values(), *values]
        for number in flow.last_used.get(position, ()):
            if number in alive:
                size -= alive.pop(number)[2]
    known[name] = (max(best, 0), snapshot)
    return known[name]


def _run_by(instruction: Instruction) -> list[str]:
    """Computations with memory of their own that an instruction runs."""
    if instruction.opcode in ("while", "call", "conditional", "async-start"):
        return instruction.all_called
    return []


class _Flow:
    """Which buffers each instruction of a computation makes, and where each is used last."""

    def __init__(self, program: Program, computation: Computation):
        self.program = program
        self.buffers: dict[int, Any] = {}
        self.made: list[list[int]] = []
        self.values: dict[str, Value] = {}
        self.by_name = computation.by_name
        last: dict[int, int] = {}
        for position, instruction in enumerate(computation.instructions):
            before = len(self.buffers)
            self.values[instruction.name] = self._value(instruction)
            fresh = range(before, len(self.buffers))
            self.made.append([] if instruction.opcode in ("parameter", "constant") else list(fresh))
            used = [] if instruction.opcode in ("tuple", "get-tuple-element", "bitcast") else instruction.operands
            for number in [n for name in used for n in _flat(self.values.get(name, ()))] + list(fresh):
                last[number] = position
        # What the computation returns lies where its caller keeps it: a loop's carry, or the program's results.
        returned = set(_flat(self.values[computation.root.name]))
        self.made = [[n for n in made if n not in returned and self._in_hbm(n)] for made in self.made]
        self.last_used: dict[int, list[int]] = {}
        for number, position in last.items():
            self.last_used.setdefault(position, []).append(number)

    def _in_hbm(self, number: int) -> bool:
        return self.buffers[number].space == 0 and self.buffers[number].padded_bytes > 0

    def _new(self, shape: str) -> Value:
        if shape.startswith("("):
            return tuple(self._new(element) for element in elements_of(shape))
        arrays = arrays_of(shape)
        if not arrays:
            return ()
        self.buffers[len(self.buffers)] = arrays[0]
        return len(self.buffers) - 1

    def _value(self, instruction: Instruction) -> Value:
        opcode = instruction.opcode
        operands = [self.values.get(name, ()) for name in instruction.operands]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            index = re.search(r"\bindex=(\d+)", instruction.attributes)
            return _element(operands[0], int(index[1])) if index else ()
        if opcode in ("bitcast", "while", "optimization-barrier", "dynamic-update-slice", "all-reduce-done"):
            return operands[0]
        if opcode == "copy-start":
            destination = self._new(elements_of(instruction.shape)[0])
            return (destination, operands[0], ())
        if opcode == "copy-done":
            return _element(operands[0], 0)
        if opcode.endswith("-start") and opcode != "all-reduce-start":
            elements = elements_of(instruction.shape)
            return (tuple(operands), self._new(elements[1] if len(elements) > 1 else elements[0]))
        if opcode.endswith(("-done", "-update")):
            return _element(operands[0], 1) if opcode.endswith("-done") else operands[0]
        return self._with_aliases(instruction, operands)

    def _with_aliases(self, instruction: Instruction, operands: list[Value]) -> Value:
        """Fresh buffers, but for the results that are written over an operand."""
        aliases = self._written_over(instruction)
        shapes = elements_of(instruction.shape)
        results = []
        for index, shape in enumerate(shapes):
            operand, path = aliases.get(index, (None, ()))
            value: Value = None
            if operand is not None and operand < len(operands):
                value = operands[operand]
                for step in path:
                    value = _element(value, step)
            results.append(self._new(shape) if value is None or value == () else value)
        return tuple(results) if instruction.shape.startswith("(") else results[0]

    def _written_over(self, instruction: Instruction) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Result -> (operand, path in it) whose memory it takes."""
        listed = instruction.attributes.partition("output_to_operand_aliasing=")[2]
        aliases = {
            int(result or 0): (int(operand), tuple(int(p) for p in path.split(",") if p.strip()))
            for result, operand, path in _ALIASES.findall(listed.partition("}, c")[0])
        }
        inner = self.program.computations.get(instruction.called("calls") or "")
        if instruction.opcode != "fusion" or inner is None:
            return aliases
        roots = [inner.root]
        if inner.root.opcode == "tuple":
            roots = [inner.by_name[name] for name in inner.root.operands]
        for index, root in enumerate(roots):
            updated = _through_bitcasts(inner, root)
            if updated.opcode == "dynamic-update-slice":
                source = _through_bitcasts(inner, inner.by_name[updated.operands[0]])
                number = re.match(r"\((\d+)\)", source.attributes)
                if source.opcode == "parameter" and number:
                    aliases.setdefault(index, (int(number[1]), ()))
        return aliases


def _through_bitcasts(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = computation.by_name[instruction.operands[0]]
    return instruction


def _element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) and index < len(value) else ()


def _flat(value: Value) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [number for element in value for number in _flat(element)]


def _where(instruction: Instruction) -> str:
    """The traced program's name without the transformations' wrappers; the opcode where there is none."""
    parts = [part for part in instruction.op_name.split("/") if part and not _WRAPPERS.fullmatch(part)]
    return "/".join(parts[-4:]) or instruction.opcode
