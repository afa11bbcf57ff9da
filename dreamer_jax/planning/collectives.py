"""What the chips of a compiled step send each other: every collective of its HLO, with bytes, mesh axes and loops."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from dreamer_jax.parallel.mesh import SLICE
from dreamer_jax.planning.hlo import Array, Computation, Instruction, Program, arrays_of, elements_of

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[((?:'[^']+'=\d+,?)+)\] \{((?:'[^']+',?)+)\}")
"""Groups by axes of a mesh in the order of its partitions, as newer XLA writes them."""


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
        kind: as HLO calls it; an all-reduce fused with the slice of its result is a reduce-scatter.
        fused: it is such a fusion.
        overlapped: it runs beside other work, in steps that the compiler fused with that work.
        arrays: the full arrays, e.g. "bf16[4096,4096]": what a gather makes, what a reduction takes.
        bytes: of them, a chip.
        axes: mesh axes it goes over.
        group: chips of a group.
        loops: names of the loops whose bodies it stands in, outermost first.
        times: how often it runs in a step; None when a loop's count isn't written in the program.
        op_name: where in the traced program it comes from.
    """

    kind: str
    fused: bool
    overlapped: bool
    arrays: tuple[str, ...]
    bytes: int
    axes: tuple[str, ...]
    group: int
    loops: tuple[str, ...]
    times: int | None
    op_name: str


def find_collectives(program: Program, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Every collective of the program.

    Args:
        program: scheduled HLO of one partition.
        mesh_shape: axis name -> size, in the mesh's order; partitions are numbered row-major over it.
    """
    fusions = {name: inner for name in program.computations if (inner := _scatter_inside(program, name))}
    starts = _chain_starts(program)
    found = []
    for computation, instruction, loops in program.visits():
        kind = next((k for k in KINDS if instruction.opcode in (k, f"{k}-start")), None)
        inner, fused = instruction, False
        if instruction.opcode == "fusion" and (target := instruction.called("calls")) in fusions:
            kind, inner, fused = "reduce-scatter", fusions[target], True
        elif computation.name in fusions:
            continue  # counted as the fusion that calls it
        chained = 'chain_id="' in inner.attributes
        if kind is None or (chained and computation.name not in starts):
            continue  # the later links of a chain are the same collective
        arrays = _full_arrays(kind, instruction, inner, fused, program, computation)
        groups, axes = _groups(inner, mesh_shape)
        counts = [trip_count(program, loop) for loop in loops]
        found.append(
            Collective(
                kind,
                fused,
                chained or instruction.opcode.endswith("-start"),
                tuple(map(str, arrays)),
                sum(array.bytes for array in arrays),
                axes,
                groups,
                tuple(loop.name for loop in loops),
                None if None in counts else math.prod(c for c in counts if c is not None),
                instruction.op_name or inner.op_name,
            )
        )
    return found


def large_all_reduces(found: Collection[Collective], elements: int) -> list[str]:
    """Floating arrays of at least that many elements that are summed in full on every chip of a slice: of a gradient,
    or a part of one, that should have been scattered. Slices have copies of the state: between them sums are meant."""
    sums = [c for c in found if c.kind == "all-reduce" and c.axes != (SLICE,)]
    arrays = [array for c in sums for text in c.arrays for array in arrays_of(text)]
    return [str(a) for a in arrays if a.dtype[0] in "bf" and math.prod(a.dims) >= elements]


def weight_copies(program: Program, shapes: Collection[tuple[int, ...]]) -> list[str]:
    """Copies within HBM of whole weights, e.g. to another layout or order of dimensions: "name: bf16[...]"."""
    wanted = {tuple(sorted(shape)) for shape in shapes}
    copies = []
    for computation, instruction, _ in program.visits():
        if instruction.opcode not in ("copy", "copy-start", "transpose"):
            continue
        arrays = [a for a in instruction.arrays if tuple(sorted(a.dims)) in wanted]
        source = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
        spaces = {a.space for a in arrays} | ({a.space for a in source.arrays} if source else set())
        if arrays and spaces == {0}:  # a prefetch into on-chip memory is no copy
            copies.append(f"{instruction.name}: {arrays[0]}")
    return copies


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often a `while` runs its body: the bound its condition compares a counter from zero with, if constant."""
    condition = program.computations.get(loop.called("condition") or "")
    if condition is None:
        return None
    compare = condition.root
    if compare.opcode == "fusion":
        inner = program.computations.get(compare.called("calls") or "")
        compare = inner.root if inner else compare
        bounds = [i for i in condition.instructions if i.opcode == "constant"]
        bounds += [i for i in inner.instructions if i.opcode == "constant"] if inner else []
    else:
        bounds = [condition.by_name[o] for o in compare.operands if condition.by_name[o].opcode == "constant"]
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    if len(bounds) == 1:
        return _constant(bounds[0])
    return _carried_bound(program, loop, condition, compare)


def _carried_bound(program: Program, loop: Instruction, condition: Computation, compare: Instruction) -> int | None:
    """The bound when the loop carries it: the constant that the tuple it starts from has there."""
    elements = [condition.by_name[name] for name in compare.operands if name in condition.by_name]
    indices = [re.search(r"\bindex=(\d+)", e.attributes) for e in elements if e.opcode == "get-tuple-element"]
    if len(indices) != 2 or not indices[1]:
        return None
    for computation in program.computations.values():
        start = computation.by_name.get(loop.operands[0])
        if start is not None and loop.name in computation.by_name and start.opcode == "tuple":
            source = computation.by_name.get(start.operands[int(indices[1][1])])
            while source is not None and source.opcode in ("copy", "bitcast") and source.operands:
                source = computation.by_name.get(source.operands[0])
            return _constant(source) if source is not None and source.opcode == "constant" else None
    return None


def _constant(instruction: Instruction) -> int | None:
    found = re.match(r"\((-?\d+)\)", instruction.attributes)
    return int(found[1]) if found else None


def _chain_starts(program: Program) -> set[str]:
    """Computations that begin a collective whose later steps are fused with other work, even in loops."""
    instructions = [i for computation in program.computations.values() for i in computation.instructions]
    return {name for i in instructions if i.name.startswith("async-collective-start") for name in i.all_called}


def _scatter_inside(program: Program, name: str) -> Instruction | None:
    """The all-reduce of a computation that reduces and keeps one slice of the result."""
    computation = program.computations[name]
    if name == program.entry or computation.root.opcode != "dynamic-slice":
        return None
    return next((i for i in computation.instructions if i.opcode == "all-reduce"), None)


def _full_arrays(
    kind: str, outer: Instruction, inner: Instruction, fused: bool, program: Program, computation: Computation
) -> list[Array]:
    if fused:
        source = computation.by_name.get(outer.operands[0])
        return list(source.arrays) if source else list(inner.arrays)
    shape = inner.shape
    if inner.opcode.endswith("-start") and kind != "all-reduce":
        elements = elements_of(shape)  # (operands, results, contexts ...)
        shape = elements[1] if len(elements) > 1 else shape
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        sources = [computation.by_name[name] for name in inner.operands if name in computation.by_name]
        arrays = [array for source in sources for array in source.arrays]
        return arrays[:1] if kind == "ragged-all-to-all" else arrays
    return list(arrays_of(shape))


def _groups(instruction: Instruction, mesh_shape: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """(chips of a group, the mesh axes along which they differ)."""
    members = _first_group(instruction.attributes)
    total = math.prod(mesh_shape.values())
    if members is None:
        return total, tuple(axis for axis, size in mesh_shape.items() if size > 1)
    if max(members) >= total:
        return len(members), ()
    coordinates = np.array(np.unravel_index(np.array(members), tuple(mesh_shape.values())))
    differ = (coordinates != coordinates[:, :1]).any(axis=1)
    return len(members), tuple(axis for axis, differs in zip(mesh_shape, differ, strict=True) if differs)


def _first_group(attributes: str) -> list[int] | None:
    """Partitions of the first group; of a permute, those of one pair. None: all of them."""
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pairs:
        return [int(pairs[1]), int(pairs[2])]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return [int(member) for member in listed[1].split(",")]
    along = re.search(r"replica_groups=" + _MESH.pattern, attributes)
    if along:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", along[1])}
        ids, axes = np.arange(math.prod(sizes.values())).reshape(list(sizes.values())), set(along[2].split(","))
        return ids[tuple(slice(None) if f"'{name}'" in axes else 0 for name in sizes)].ravel().tolist()
    found = re.search(r"replica_groups=" + _IOTA.pattern, attributes)
    if not found:
        unknown = re.search(r"replica_groups=(?!\{\})\S+", attributes)
        if unknown:
            raise ValueError(f"the groups of a collective are written in an unknown way: {unknown[0]}")
        return None
    shape = [int(n) for n in found[1].split(",")]
    ids = np.arange(math.prod(int(n) for n in found[2].split(","))).reshape([int(n) for n in found[2].split(",")])
    if found[3]:
        ids = ids.transpose([int(n) for n in found[3].split(",")])
    return ids.reshape(shape[0], -1)[0].tolist()
