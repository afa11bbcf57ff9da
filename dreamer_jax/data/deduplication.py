"""Exact and near duplicates over all parts of a preparation, in bounded memory.

Keys were sorted within every part; a task takes one range of all keys, so that equal keys of all parts meet in it.
Near duplicates are found in three steps: candidates (records that share a band key), confirmed (exact Jaccard
similarity), and resolved in order: a record is dropped when an earlier one that stays is its near duplicate.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dreamer_jax.data.filtering import compared
from dreamer_jax.data.storage import PartReader, write_array
from dreamer_jax.data.words import jaccard, shingle_set

KEYS_IN_A_TASK = 2_000_000
"""About the keys that one task holds in memory."""

COMPARED = 16
"""In a group of records with one key, each is compared with this many at the group's beginning and before it."""

PENDING = 1_000_000
"""Pairs that are gathered before those that are there already are taken out."""

PAIRS_AT_ONCE = 65_536

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
    begins = np.concatenate([[True], found["key"][1:] != found["key"][:-1]]) if len(found) else np.zeros(0, np.bool_)
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(found)), 0)) if len(found) else np.zeros(0, np.int64)
    places = np.flatnonzero(~begins)  # with another record of their key before them
    starts, ids = starts[places], found["id"]
    pairs, distinct = np.zeros(0, PAIR), 0
    for distance in range(COMPARED):
        for others in (starts + distance, places - 1 - distance):  # at the group's beginning, and before the record
            inside = (others >= starts) & (others < places)
            new = np.empty(int(inside.sum()), PAIR)
            new["later"], new["earlier"] = ids[places[inside]], ids[others[inside]]
            pairs = np.concatenate([pairs, new[new["later"] != new["earlier"]]])
            if len(pairs) > 2 * distinct + PENDING:  # groups of many bands hold the same pairs
                pairs = _distinct(pairs)
                distinct = len(pairs)
    write_array(output, _distinct(pairs))


def _distinct(pairs: np.ndarray) -> np.ndarray:
    """The pairs, sorted, each once; as np.unique, but faster on two columns."""
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["later"]))]
    new = np.ones(len(pairs), np.bool_)
    new[1:] = (pairs["later"][1:] != pairs["later"][:-1]) | (pairs["earlier"][1:] != pairs["earlier"][:-1])
    return pairs[new]


def confirm(
    parts: Sequence[Part], part: int, candidates: Sequence[Path], threshold: float, compare: str, output: Path
) -> None:
    """Write CONFIRMED pairs whose later record is in a part."""
    pairs = _distinct(np.concatenate([of_part(np.load(path, mmap_mode="r"), part) for path in candidates]))
    readers: dict[int, PartReader] = {}

    def read(identity: int) -> set[tuple[str, ...]]:
        number = identity >> 32
        if number not in readers:
            if len(readers) > 64:
                readers.pop(next(iter(readers))).close()
            readers[number] = PartReader(parts[number].directory, parts[number].number)
        return shingle_set(compared(readers[number][identity & 0xFFFFFFFF], compare))

    texts = _Shingles(read)
    confirmed = [np.zeros(0, CONFIRMED)]
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        alike = []
        for later, earlier in pairs[start : start + PAIRS_AT_ONCE].tolist():
            similarity = jaccard(texts(later), texts(earlier))
            if similarity >= threshold:
                alike.append((later, earlier, similarity))
        confirmed.append(np.array(alike, CONFIRMED))
    for reader in readers.values():
        reader.close()
    write_array(output, np.concatenate(confirmed))


class _Shingles:
    """The shingles of records, kept for the records that are compared often: in large groups those are the same."""

    LIMIT = 200_000

    def __init__(self, read: Callable[[int], set[tuple[str, ...]]]):
        self._read, self._size = read, 0
        self._kept: OrderedDict[int, set[tuple[str, ...]]] = OrderedDict()

    def __call__(self, identity: int) -> set[tuple[str, ...]]:
        found = self._kept.pop(identity, None)
        if found is None:
            found = self._read(identity)
            self._size += len(found)
        self._kept[identity] = found
        while self._size > self.LIMIT and len(self._kept) > 2:
            self._size -= len(self._kept.popitem(last=False)[1])
        return found


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
