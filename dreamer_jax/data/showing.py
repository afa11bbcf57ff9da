"""Batches as text, for `dreamer data show`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from dreamer_jax.data.pipeline import Data
from dreamer_jax.data.records import Batch
from dreamer_jax.data.tokenizers import Tokenizer

STEPS = 16
"""Batches that the fill rate and the lengths are taken from."""

BAR = 40


def show(data: Data, documents: int) -> Iterator[str]:
    """Lines: the first documents of step 0 as the model sees them, the fill rate, a histogram of lengths."""
    yield data.summary
    if data.copies > 1:
        yield f"of {data.copies} copies of each token the last, which is trained on, is shown and counted"

    def batch_at(step: int) -> Batch:
        return {name: its[:, data.copies - 1 :: data.copies] for name, its in data.batch_at(step).items()}

    batch = batch_at(0)
    yield ""
    yield "> given (no loss)   * trained on"
    for count, (row, segment) in enumerate(_segments(batch)):
        if count == documents:
            break
        yield ""
        yield from _document(batch, row, segment, data.tokenizer)
    yield ""
    yield from _statistics([batch, *(batch_at(step) for step in range(1, STEPS))])


def _segments(batch: Batch) -> Iterator[tuple[int, int]]:
    for row, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments.max()) + 1):
            yield row, segment


def _document(batch: Batch, row: int, segment: int, tokenizer: Tokenizer) -> Iterator[str]:
    places = np.flatnonzero(batch["segment_ids"][row] == segment)
    if "read" in batch:
        yield from _puzzle(batch, row, places, tokenizer)
        return
    first, last = int(places[0]), int(places[-1])
    yield f"-- row {row}, document {segment}: places {first} to {last}, {len(places)} tokens"
    # The first input is seen and never predicted; every target is trained on or not.
    ids = [int(batch["tokens"][row, first]), *batch["targets"][row, places].tolist()]
    trained = [False, *batch["loss_mask"][row, places].tolist()]
    borders = [i for i in range(len(ids) + 1) if i in (0, len(ids)) or trained[i] != trained[i - 1]]
    for start, stop in pairwise(borders):
        text = _text(ids[start:stop], tokenizer)
        for line in text.split("\n"):
            yield f"{'*' if trained[start] else '>'} {line}"


def _puzzle(batch: Batch, row: int, places: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """A puzzle and its label; of a graph, its edges."""
    read = batch["read"][row].tolist()
    yield f"-- row {row}: {len(places)} tokens, places read {' '.join(map(str, read))}"
    if "visible" in batch:
        seen = batch["visible"][row] & ~np.eye(len(batch["visible"][row]), dtype=bool)
        yield f"  > {' '.join(f'{start}->{end}' for end, start in np.argwhere(seen).tolist())}"
    else:
        yield f"  > {tokenizer.decode(batch['tokens'][row, places].tolist())}"
    yield f"  * {batch['targets'][row, read[0]]}"


def _text(ids: list[int], tokenizer: Tokenizer) -> str:
    names = {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    head = names.get(ids[0], "")
    tail = names.get(ids[-1], "") if len(ids) > 1 else ""
    return head + tokenizer.decode(ids[1 if head else 0 : -1 if tail else None]) + tail


def _statistics(batches: list[Batch]) -> Iterator[str]:
    filled = sum(int((batch["segment_ids"] > 0).sum()) for batch in batches)
    places = sum(batch["segment_ids"].size for batch in batches)
    trained = sum(int(batch["loss_mask"].sum()) for batch in batches)
    lengths = np.concatenate(
        [np.bincount(row)[1:] for batch in batches for row in batch["segment_ids"] if row.max() > 0]
    )
    lengths = lengths[lengths > 0]
    yield (
        f"{len(batches)} batches: rows {filled / places:.1%} full, loss on {trained / max(1, filled):.1%} of the "
        f"tokens, {len(lengths):,} documents of {lengths.mean():.0f} tokens on average, at most {lengths.max():,}"
    )
    edges = [1 << i for i in range(int(lengths.max()).bit_length() + 1)]
    counts = np.histogram(lengths, edges)[0]
    for (low, high), count in zip(pairwise(edges), counts.tolist(), strict=True):
        if counts[: edges.index(low)].sum() or count:
            bar = "#" * round(BAR * count / max(counts))
            yield f"{low:>8,} to {high - 1:<8,}{count:>8,}  {bar}".rstrip()
