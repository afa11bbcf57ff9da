"""A compiled program's text (HLO) as data: computations, instructions, and the bytes of their values.

Read from `Compiled.as_text()`, or what the compiler dumps after its optimisations: a scheduled module, each line
`%name = shape opcode(%operands), attributes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_LEAF = re.compile(r"([a-z]+\d*\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)?)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """One array of a value.

    Attributes:
        dtype: as HLO writes it, e.g. bf16.
        dims: its sizes.
        bytes: unpadded.
        padded_bytes: with its minor dimensions padded to the tile of its layout, as it lies in memory.
        space: memory space; 0 is HBM, others are on the chip.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    padded_bytes: int
    space: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its value, those of a tuple in order."""
        return arrays_of(self.shape)

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; empty when the compiler doesn't say."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self, attribute: str) -> str | None:
        """The computation named by an attribute such as `body`."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def all_called(self) -> list[str]:
        """Every computation it calls."""
        return [name for listed in _CALLED.findall(self.attributes) for name in _NAME.findall(listed)]


@dataclass
class Computation:
    """Instructions in the order they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])


@dataclass
class Program:
    """A module."""

    computations: dict[str, Computation]
    entry: str

    def visits(self) -> Iterator[tuple[Computation, Instruction, tuple[Instruction, ...]]]:
        """Every instruction the entry reaches, with the loops around it from the outermost in, each once a caller.

        Yields:
            (computation, instruction, the `while` instructions it stands in the bodies of).
        """
        waiting: list[tuple[str, tuple[Instruction, ...]]] = [(self.entry, ())]
        while waiting:
            name, loops = waiting.pop()
            computation = self.computations[name]
            for instruction in computation.instructions:
                yield computation, instruction, loops
                inner = (*loops, instruction) if instruction.opcode == "while" else loops
                waiting += [(called, inner) for called in instruction.all_called if called in self.computations]


def parse_program(text: str) -> Program:
    """Read the text of a module.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}
    entry, current = "", None
    for line in _whole_lines(text):
        if line == "}":
            current = None
        elif current is None:
            header = _HEADER.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry, known = current.name if header[1] else entry, {}
        else:
            instruction = _instruction(line)
            for each in [*_elements(instruction, known), instruction] if instruction else []:
                known[each.name] = each
                current.instructions.append(each)
    if not entry:
        raise ValueError("the text has no ENTRY computation; is it that of a compiled HLO module?")
    return Program(computations, entry)


def _whole_lines(text: str) -> list[str]:
    """The lines of a module; what a kernel's description broke into several is one again."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside or line == "}" or _LINE.match(line):
            lines.append(line)
        else:
            lines[-1] += line
        inside = line != "}" and (inside or bool(_HEADER.match(line)))
    return lines


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The arrays that a shape names, nested tuples flattened."""
    return tuple(_array(*found.groups()) for found in _LEAF.finditer(shape))


def elements_of(shape: str) -> list[str]:
    """The shapes of a tuple's elements; a shape that is no tuple is its own only element."""
    if not shape.startswith("("):
        return [shape]
    elements, depth, start = [], 0, 1
    for position, letter in enumerate(shape):
        if letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        if (letter == "," and depth == 1) or (depth == 0 and letter == ")"):
            elements.append(re.sub(r"/\*.*?\*/", "", shape[start:position]).strip())
            start = position + 1
    return [element for element in elements if element]


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    open_at = rest.find("(")
    if open_at < 0:
        return None
    close_at = _closing(rest, open_at)
    operands = tuple(_NAME.findall(rest[open_at : close_at + 1]))
    if rest.startswith(("parameter(", "constant(")):
        operands = ()
        return Instruction(head[2], shape, rest[:open_at], operands, rest[open_at:], bool(head[1]))
    return Instruction(head[2], shape, rest[:open_at], operands, rest[close_at + 1 :], bool(head[1]))


def _elements(instruction: Instruction, known: dict[str, Instruction]) -> Iterator[Instruction]:
    """What newer compilers write as operands `%x#2`, element 2 of a tuple, as instructions of their own, which earlier
    ones write: those that aren't among the known ones of the computation yet."""
    for name in dict.fromkeys(instruction.operands):
        whole, hash_mark, index = name.rpartition("#")
        if hash_mark and name not in known and whole in known:
            shape = elements_of(known[whole].shape)[int(index)]
            yield Instruction(name, shape, "get-tuple-element", (whole,), f", index={index}", False)


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def _array(dtype: str, dims_text: str, layout: str | None) -> Array:
    dims = tuple(int(size.strip("<= ")) for size in dims_text.split(",") if size.strip())
    bits = BITS.get(dtype)
    if bits is None:
        digits = re.search(r"\d+", dtype)
        bits = int(digits[0]) if digits else 8
    layout = layout or ""
    space = _SPACE.search(layout)
    padded = math.prod(_padded(dims, layout))
    return Array(dtype, dims, math.prod(dims) * bits // 8, padded * bits // 8, int(space[1]) if space else 0)


def _padded(dims: tuple[int, ...], layout: str) -> list[int]:
    """The sizes with the minor dimensions rounded up to the layout's outer tile."""
    sizes = list(dims)
    tile = _TILE.search(layout)
    order = [int(d) for d in layout.partition(":")[0].split(",") if d.strip().isdigit()]
    if not tile or not dims or len(order) != len(dims):
        return sizes
    tile_sizes = [int(t) for t in tile[1].split(",")]
    for axis, size in zip(order, reversed(tile_sizes), strict=False):
        sizes[axis] = -(-sizes[axis] // size) * size
    return sizes
