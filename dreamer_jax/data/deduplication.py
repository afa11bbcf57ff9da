"""Exact and near duplicates over all parts of a preparation, in bounded memory.

Keys were sorted within every part; a task takes one range of all keys, so that equal keys of all parts meet in it.
Near duplicates are found in three steps: candidates (records that share a band key), confirmed (exact Jaccard
similarity), and resolved in order: a record is dropped when an earlier one that stays is its near duplicate.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dreamer_jax.data.filtering import compared
from dreamer_jax.data.storage import PartReader, write_array
from dreamer_jax.data.words import jaccard

KEYS_IN_A_TASK = 2_000_000
"""About the keys that one task holds in memory."""

COMPARED = 16
"""In a group of records with one key, each is compared with this many at the group's beginning and before it."""

ID = np.dtype("<i8")
PAIR = np.dtype([("later", "<i8"), ("earlier", "<i8")])
"""Two record ids (part << 32 | record in the part)."""
CONFIRMED = np.dtype([("later", "<i8"), ("earlier", "<i8"), ("similarity", "<f8")])


class Part(NamedTuple):
    """One part of a unit, in the order of all parts."""

    source: str
    unit: int
    directory: Path
    number: int
    records: int
    tokens: int


def key_ranges(keys: int) -> list[tuple[int, int]]:
    """Cut the 64-bit keys into ranges (first, last) that hold about KEYS_IN_A_TASK of `keys` keys each."""
    n = max(1, -(-keys // KEYS_IN_A_TASK))
    edges = [(i << 64) // n for i in range(n + 1)]
    return [(first, last - 1) for first, last in itertools.pairwise(edges)]


def find_exact(parts: Sequence[Part], first: int, last: int, output: Path) -> None:
    """Write PAIRs of the exact duplicates whose keys are in a range: each with the first of its kind."""
    found = _gather(parts, "exact", first, last)
    found = found[np.lexsort((found["id"], found["check"], found["key"]))]
    same = np.zeros(len(found), np.bool_)
    same[1:] = (found["key"][1:] == found["key"][:-1]) & (found["check"][1:] == found["check"][:-1])
    starts = np.maximum.accumulate(np.where(same, 0, np.arange(len(found)))) if len(found) else np.zeros(0, np.int64)
    pairs = np.empty(int(same.sum()), PAIR)
    pairs["later"], pairs["earlier"] = found["id"][same], found["id"][starts[same]]
    write_array(output, np.sort(pairs, order="later"))


def find_candidates(parts: Sequence[Part], first: int, last: int, exact: np.ndarray, output: Path) -> None:
    """Write PAIRs of records that share a band key in a range.

    Args:
        exact: sorted ids of the exact duplicates, which are left out.
    """
    found = _gather(parts, "bands", first, last)
    found = found[~_is_in(found["id"], exact)]
    found = found[np.lexsort((found["id"], found["key"]))]
    edges = (
        np.flatnonzero(np.concatenate([[True], found["key"][1:] != found["key"][:-1], [True]])) if len(found) else []
    )
    pairs = []
    for start, stop in itertools.pairwise(edges):
        if stop - start < 2:
            continue
        ids = found["id"][start:stop].tolist()
        for place in range(1, len(ids)):
            others = {*ids[: min(place, COMPARED)], *ids[max(0, place - COMPARED) : place]}
            pairs += [(ids[place], other) for other in others if other != ids[place]]
    write_array(output, np.unique(np.array(pairs, PAIR)))


def confirm(
    parts: Sequence[Part], part: int, candidates: Sequence[Path], threshold: float, compare: str, output: Path
) -> None:
    """Write CONFIRMED pairs whose later record is in a part."""
    pairs = np.unique(np.concatenate([of_part(np.load(path, mmap_mode="r"), part) for path in candidates]))
    readers: dict[int, PartReader] = {}

    def text(identity: int) -> str:
        number = identity >> 32
        if number not in readers:
            if len(readers) > 64:
                readers.pop(next(iter(readers))).close()
            readers[number] = PartReader(parts[number].directory, parts[number].number)
        return compared(readers[number][identity & 0xFFFFFFFF], compare)

    confirmed = []
    for later, earlier in pairs.tolist():
        similarity = jaccard(text(later), text(earlier))
        if similarity >= threshold:
            confirmed.append((later, earlier, similarity))
    for reader in readers.values():
        reader.close()
    write_array(output, np.array(confirmed, CONFIRMED))


def resolve(confirmed: Sequence[Path]) -> np.ndarray:
    """CONFIRMED pairs of the records to drop, each with the earlier record that stays; sorted by `later`."""
    dropped: set[int] = set()
    kept = []
    for path in confirmed:
        for pair in np.load(path):
            later, earlier = int(pair["later"]), int(pair["earlier"])
            if later not in dropped and earlier not in dropped:
                dropped.add(later)
                kept.append(pair)
    return np.array(kept, CONFIRMED)


def of_part(pairs: np.ndarray, part: int) -> np.ndarray:
    """Those of pairs sorted by `later` whose later record is in a part."""
    low, high = _place(pairs["later"], part << 32), _place(pairs["later"], (part + 1) << 32)
    return np.array(pairs[low:high])


def _place(column: np.ndarray, value: int) -> int:
    """Index of the first entry of a sorted column that is at least `value`, reading a few entries only."""
    return bisect.bisect_left(range(len(column)), value, key=lambda i: int(column[i]))


def _gather(parts: Sequence[Part], kind: str, first: int, last: int) -> np.ndarray:
    """The entries of all parts with keys in first..last, with the ids of their records."""
    slices = []
    for number, part in enumerate(parts):
        entries = np.load(part.directory / f"{part.number}.{kind}.npy", mmap_mode="r")
        low, high = _place(entries["key"], first), _place(entries["key"], last + 1)
        found = entries[low:high]
        fields = [("key", "<u8"), ("id", "<i8")] + ([("check", "<u8")] if kind == "exact" else [])
        array = np.empty(len(found), fields)
        array["key"] = found["key"]
        array["id"] = found["record"].astype(np.int64) | (number << 32)
        if kind == "exact":
            array["check"] = found["check"]
        slices.append(array)
    return np.concatenate(slices)


def _is_in(ids: np.ndarray, sorted_ids: np.ndarray) -> np.ndarray:
    if not len(sorted_ids):
        return np.zeros(len(ids), np.bool_)
    places = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return sorted_ids[places] == ids
