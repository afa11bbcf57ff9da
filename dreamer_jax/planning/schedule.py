"""A profiler without a TPU: the static schedule that libtpu compiled a kernel to, bundle by bundle.

A TPU core issues one bundle of instructions a cycle, in the order that the compiler fixed, so bundles times trips over
the clock is the time a kernel computes. What this leaves out: waiting for memory, which is counted apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9}
"""Bundles a second of one core, by chip."""

DUMP_FLAGS = "--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
"""For LIBTPU_INIT_ARGS, read once when libtpu starts: hence a process of its own."""

BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{")
JUMP = re.compile(r"sbr\.rel .*target = \$region(\d+)")
REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
DELAY_SLOTS = 4


@dataclass(frozen=True)
class Loop:
    """A loop of the schedule.

    Attributes:
        level: 1 for the grid's, more for loops inside it.
        start, end: its first and last bundle.
        own: bundles that are in no inner loop.
        branches: of `own`, those that each branch skips that holds no branch itself, in program order.
    """

    level: int
    start: int
    end: int
    own: int
    branches: tuple[int, ...]

    @property
    def optional(self) -> int:
        """Of `own`, those that some branch skips."""
        return sum(self.branches)

    def longest(self, count: int) -> list[int]:
        """The longest branches, in program order."""
        chosen = sorted(range(len(self.branches)), key=lambda n: -self.branches[n])[:count]
        return [self.branches[n] for n in sorted(chosen)]

    @property
    def bundles(self) -> int:
        """From first to last, inner loops once."""
        return self.end - self.start + 1


@dataclass(frozen=True)
class Schedule:
    """Of one kernel.

    Attributes:
        bundles: of the whole program.
        loops: in program order; the first is the grid's.
        capacity: unit -> instructions of it that one bundle holds.
        use: unit -> instructions in each bundle.
    """

    bundles: int
    loops: tuple[Loop, ...]
    capacity: dict[str, int]
    use: dict[str, tuple[int, ...]]

    @property
    def leaves(self) -> tuple[Loop, ...]:
        """The innermost loops, in program order."""
        following = (*self.loops[1:], None)
        return tuple(a for a, b in zip(self.loops, following, strict=True) if b is None or b.level <= a.level)

    @property
    def matrix_busy(self) -> float:
        """How busy the matrix unit is from its first instruction to its last; 0 where there is none."""
        unit = "MXU" if "MXU" in self.use else "MATMUL"  # which newer versions tell apart from loading weights
        used = [n for n, count in enumerate(self.use.get(unit, ())) if count]
        return self.busy(unit, used[0], used[-1]) if used else 0.0

    def busy(self, unit: str, start: int, end: int) -> float:
        """The share of its capacity that a unit is used to between two bundles, both included; 0 to 1."""
        return sum(self.use[unit][start : end + 1]) / (self.capacity[unit] * (end - start + 1))


def read_schedule(directory: Path, kernel: str) -> Schedule:
    """The schedule of the kernel of this name (the newest of that name) that libtpu dumped to a directory.

    Raises:
        FileNotFoundError: when it dumped none.
    """
    bundles = _newest(directory, rf"-[A-Za-z_]*{kernel}[_.\d]*-\d+-final_bundles\.txt$")
    usage = _newest(directory, rf"-[A-Za-z_]*{kernel}[_.\d]*-\d+-final_hlo-static-per-bundle-utilization\.txt$")
    header, capacity, *rows = (line for line in usage.read_text().splitlines()[1:] if line.strip())
    units = [name.strip() for name in header.split(",")]
    table = [tuple(map(int, row.split())) for row in rows if re.match(r"[\s\d]+$", row)]
    return Schedule(
        bundles=len(table),
        loops=_loops(bundles.read_text().splitlines()),
        capacity=dict(zip(units, map(int, capacity.split()), strict=True)),
        use=dict(zip(units, zip(*table, strict=True), strict=True)),
    )


def _newest(directory: Path, pattern: str) -> Path:
    found = [path for path in directory.iterdir() if re.search(pattern, path.name)]
    if not found:
        raise FileNotFoundError(f"libtpu wrote no schedule like {pattern} to {directory}")
    return max(found, key=lambda path: int(path.name.partition("-")[0]))


def _loops(lines: list[str]) -> tuple[Loop, ...]:
    """Loops begin at a bundle labelled LB whose arrows tell the level, and end before a label of an outer level."""
    labels, starts, jumps, regions = [], [], [], {}
    levels: dict[int, int] = {}
    address = 0
    for line in lines:
        match = BUNDLE.match(line)
        if match:
            address, level = int(match[1], 16), len(match[3])
            levels[address] = level
            if match[2]:
                labels.append((address, level))
            if match[2] == "LB":
                starts.append((address, level))
        jumps += [(address, target) for target in JUMP.findall(line)]
        for region in REGION.findall(line):
            regions.setdefault(region, address)
    skips = [(a + DELAY_SLOTS + 1, regions[target] - 1) for a, target in jumps if regions.get(target, 0) > a]
    spans = []
    for start, level in starts:
        limit = min((a for a, outer in labels if a > start and outer < level), default=max(levels) + 1)
        spans.append((start, max(a for a, l in levels.items() if start <= a < limit and l >= level), level))
    return tuple(_loop(span, spans, skips) for span in spans)


def _loop(span: tuple[int, int, int], spans: list[tuple[int, int, int]], skips: list[tuple[int, int]]) -> Loop:
    start, end, level = span
    inner = {n for a, b, deeper in spans if deeper > level and start <= a <= end for n in range(a, b + 1)}
    own = set(range(start, end + 1)) - inner
    within = [(a, b) for a, b in skips if start <= a <= b <= end]
    leaves = [(a, b) for a, b in within if not any((c, d) != (a, b) and a <= c and d <= b for c, d in within)]
    branches = tuple(len(own.intersection(range(a, b + 1))) for a, b in sorted(set(leaves)))
    return Loop(level, start, end, len(own), branches)
