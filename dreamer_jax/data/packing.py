"""Documents into rows of S tokens: which document goes where, and the arrays of a batch."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from dreamer_jax.data.records import Batch, Document

OPEN_ROWS = 256
"""Rows that may still take a document while an epoch is planned; more fill rows a little better."""

KEPT_PLANS = 2
"""Epoch plans kept in memory: a batch may span the border of two epochs."""


class Piece(NamedTuple):
    """The inputs first..first + length - 1 of a document."""

    document: int
    first: int
    length: int


class Plan(Protocol):
    """Rows of an epoch; documents are named by their place in the planned order."""

    def __len__(self) -> int:
        """Rows."""
        ...

    def pieces(self, row: int) -> list[Piece]:
        """What a row holds, in order."""
        ...


class RowPlan:
    """Which documents share a row. Row j holds `plan[j]`, an int64 array of places in the planned order.

    Args:
        row_of: int64 [n], the row of each document.
        rows: how many rows there are.
        lengths: integers [n], inputs of each document.
    """

    def __init__(self, row_of: np.ndarray, rows: int, lengths: np.ndarray):
        self._lengths = lengths
        self._members = np.argsort(row_of, kind="stable")
        self._ends = np.cumsum(np.bincount(row_of, minlength=rows))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> np.ndarray:
        return self._members[self._ends[row - 1] if row else 0 : self._ends[row]]

    def pieces(self, row: int) -> list[Piece]:
        """The whole documents of a row."""
        return [Piece(place, 0, int(self._lengths[place])) for place in self[row].tolist()]


class ConcatPlan:
    """Documents end to end, cut into full rows; a document may go on in the next row. Only the last isn't full.

    Args:
        lengths: integers [n], inputs of each document, in the order they come.
        row_length: S.
    """

    def __init__(self, lengths: np.ndarray, row_length: int):
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._row_length = row_length

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self._row_length) if len(self._ends) else 0

    def pieces(self, row: int) -> list[Piece]:
        """The documents of a row, whole or in part."""
        start = row * self._row_length
        stop = min(start + self._row_length, int(self._ends[-1]))
        first = int(np.searchsorted(self._ends, start, "right"))
        last = int(np.searchsorted(self._ends, stop, "left"))
        ends = self._ends[first : last + 1].tolist()
        begins = [int(self._ends[first - 1]) if first else 0, *ends[:-1]]
        return [
            Piece(place, max(start, begin) - begin, min(stop, end) - max(start, begin))
            for place, begin, end in zip(range(first, last + 1), begins, ends, strict=True)
        ]


def plan_rows(lengths: np.ndarray, row_length: int) -> RowPlan:
    """Pack by best fit: each document goes to the fullest of the open rows that can take it.

    At most OPEN_ROWS rows are open; beyond that the fullest is closed. Rows are numbered in the order they are
    opened. The plan depends on the arguments alone and takes constant time a document.

    Args:
        lengths: integers [n] in 1..row_length, in the order the documents come.
        row_length: S.
    """
    by_space: list[deque[int]] = [deque() for _ in range(row_length + 1)]
    spaces = 0  # bit s is set while an open row has s places left
    rows = open_rows = 0
    row_of = np.empty(len(lengths), np.int64)
    for item, length in enumerate(lengths.tolist()):
        fitting = spaces >> length
        if fitting:
            space = length + _lowest_bit(fitting)
            row = by_space[space].popleft()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = row_length, rows
            rows += 1
            open_rows += 1
        row_of[item] = row
        space -= length
        if space:
            by_space[space].append(row)
            spaces |= 1 << space
        else:
            open_rows -= 1
        if open_rows > OPEN_ROWS:
            fullest = _lowest_bit(spaces)
            by_space[fullest].popleft()
            if not by_space[fullest]:
                spaces ^= 1 << fullest
            open_rows -= 1
    return RowPlan(row_of, rows, lengths)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0..n-1 (int64 [n]) that depends on n and the seed numbers alone.

    It sorts raw random words, because NumPy keeps a bit generator's words the same over its versions and makes no
    such promise for its shuffles.
    """
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(words, kind="stable")


class EpochRows:
    """The endless stream of rows over a set of documents: epoch 0, 1, 2, ... end to end.

    Row r is a pure function of the arguments and r. Safe to call from several threads.

    Args:
        lengths: int64 [n], n > 0, inputs of each document.
        row_length: S.
        seed: of the orders.
        order: epoch -> int64 [m], the documents of the epoch in their order; by default each document exactly once,
            in an order of its own drawn from (seed, epoch).
        packing: best_fit keeps documents whole, concat cuts them at the ends of rows.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        row_length: int,
        seed: int,
        order: Callable[[int], np.ndarray] | None = None,
        packing: Literal["best_fit", "concat"] = "best_fit",
    ):
        self._lengths = lengths
        self._row_length = row_length
        self._order = order or (lambda epoch: permutation(len(lengths), seed, epoch))
        self._make_plan: Callable[[np.ndarray, int], Plan] = plan_rows if packing == "best_fit" else ConcatPlan
        self._first_rows = [0]  # of every epoch whose predecessors have been planned
        self._plans: OrderedDict[int, tuple[np.ndarray, Plan]] = OrderedDict()
        self._lock = threading.Lock()

    def row(self, index: int) -> np.ndarray:
        """Documents of row `index` (from 0): int64 indices into `lengths`, in their order in the row."""
        return np.array([piece.document for piece in self.pieces(index)], np.int64)

    def pieces(self, index: int) -> list[Piece]:
        """What row `index` (from 0) holds, in order."""
        with self._lock:
            epoch = self._epoch(index)
            order, plan = self._plan(epoch)
            first = self._first_rows[epoch]
        return [Piece(int(order[place]), start, length) for place, start, length in plan.pieces(index - first)]

    def epoch(self, index: int) -> int:
        """The epoch that row `index` belongs to."""
        with self._lock:
            return self._epoch(index)

    def rows_in_epoch(self, epoch: int) -> int:
        """Rows that one epoch takes."""
        with self._lock:
            return len(self._plan(epoch)[1])

    def _epoch(self, index: int) -> int:
        while self._first_rows[-1] <= index:
            epoch = len(self._first_rows) - 1
            self._first_rows.append(self._first_rows[-1] + len(self._plan(epoch)[1]))
        return bisect.bisect_right(self._first_rows, index) - 1

    def _plan(self, epoch: int) -> tuple[np.ndarray, Plan]:
        if epoch in self._plans:
            self._plans.move_to_end(epoch)
            return self._plans[epoch]
        order = self._order(epoch)
        self._plans[epoch] = order, self._make_plan(self._lengths[order], self._row_length)
        if len(self._plans) > KEPT_PLANS:
            self._plans.popitem(last=False)
        return self._plans[epoch]


def assemble(rows: Sequence[Sequence[Document]], row_length: int, pad: int, answer_only: bool) -> Batch:
    """Lay documents into rows.

    Args:
        rows: the documents of each of the B rows; their inputs fit into row_length together.
        row_length: S.
        pad: token of the places left over.
        answer_only: train on the completion and its end of text only, not on the prompt.

    Returns:
        [B, S] arrays. int32: `tokens`; `targets`, the token after each within its document; `segment_ids`, from 1
        in each row, 0 for padding; `positions`, from 0 in each document. bool: `loss_mask`, targets trained on;
        `answer_mask`, targets of the completion and its end of text.
    """
    shape = (len(rows), row_length)
    tokens, targets = np.full(shape, pad, np.int32), np.full(shape, pad, np.int32)
    segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    answer_mask = np.zeros(shape, np.bool_)
    for r, documents in enumerate(rows):
        start = 0
        for segment, document in enumerate(documents, start=1):
            length = len(document.tokens) - 1
            stop = start + length
            if stop > row_length:
                raise ValueError(f"row {r} holds more than {row_length} tokens")
            tokens[r, start:stop] = document.tokens[:-1]
            targets[r, start:stop] = document.tokens[1:]
            segment_ids[r, start:stop] = segment
            positions[r, start:stop] = np.arange(length)
            answer_mask[r, start + document.prompt_length : stop] = True
            start = stop
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": answer_mask.copy() if answer_only else segment_ids > 0,
        "answer_mask": answer_mask,
    }


def copied(batch: Batch, copies: int) -> Batch:
    """Each token so many times, one after the other: [B, S copies]. A copy sees those before it and all of the tokens
    before; the last one is asked for the next token (Width-NoShare, arXiv:2510.14961, Definition B.3)."""
    if copies == 1:
        return batch
    wide = {name: np.repeat(its, copies, axis=1) for name, its in batch.items()}
    own = np.tile(np.arange(copies), batch["tokens"].shape[1])
    wide["positions"] = np.where(wide["segment_ids"] > 0, wide["positions"] * copies + own, 0).astype(np.int32)
    for mask in ("loss_mask", "answer_mask"):
        wide[mask] &= own == copies - 1
    return wide


def lay_steps(rows: Sequence[Sequence[Document]], row_length: int, steps: int) -> np.ndarray:
    """What the n-th step of a problem has found, at each place that is asked for it: [B, S, N] int32 tokens, -1 where
    nothing is asked for. A place that has its last result keeps it.

    Args:
        rows, row_length: as of `assemble`.
        steps: N, the most that a problem has.
    """
    targets = np.full((len(rows), row_length, steps), -1, np.int32)
    for r, documents in enumerate(rows):
        start = 0
        for document in documents:
            for place, number, token in document.steps:
                targets[r, start + place, number - 1 :] = token
            start += len(document.tokens) - 1
    return targets
