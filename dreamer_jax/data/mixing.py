"""Prepared data as training rows: rounds of a mixture, packed, read by step."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.data.mixture import load_mixture
from dreamer_jax.data.packing import EpochRows, permutation
from dreamer_jax.data.prepared import PreparedData
from dreamer_jax.data.records import Document, cut
from dreamer_jax.data.sources import UNCUT, DocumentList, split_records
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import ConfigError, UserError

_KEPT_ORDERS = 8

LARGEST_ROUND = 200_000_000
"""Documents of a round, unless it is one pass over everything: planning takes time and memory for each."""

_ROUNDED = 0.01
"""How far, relatively, a whole number of documents may lie from a source's share of a round."""


class Rounds:
    """The documents of each round of a mixture.

    Every source is an endless stream of epochs, each its documents exactly once in an order of its own. A round
    takes the next `counts[k]` documents of source k's stream, and shuffles what it has taken: so no document comes
    again before all others of its source have come, however the shares are, and a round is a pure function of
    (seed, round). Of a count that isn't whole, round r takes floor((r + 1) count) - floor(r count).

    Args:
        groups: documents of each source, int64 [n_k].
        counts: documents a round takes of each source, on average.
        seed: of all orders.
    """

    def __init__(self, groups: Sequence[np.ndarray], counts: Sequence[float], seed: int):
        self._groups, self._counts, self._seed = groups, counts, seed
        self._orders: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def __call__(self, number: int) -> np.ndarray:
        """Documents of a round, int64 [sum of the counts], in order."""
        taken = [
            self._take(k, math.floor(number * count), math.floor((number + 1) * count))
            for k, count in enumerate(self._counts)
        ]
        documents = np.concatenate(taken)
        return documents[permutation(len(documents), self._seed, number)]

    def _take(self, source: int, start: int, stop: int) -> np.ndarray:
        """Documents start..stop - 1 of a source's stream."""
        group = self._groups[source]
        pieces = [group[:0]]
        while start < stop:
            epoch, first = divmod(start, len(group))
            last = min(len(group), first + stop - start)
            pieces.append(group[self._order(source, epoch)[first:last]])
            start += last - first
        return np.concatenate(pieces)

    def _order(self, source: int, epoch: int) -> np.ndarray:
        key = source, epoch
        if key not in self._orders:
            self._orders[key] = permutation(len(self._groups[source]), self._seed, 1 + source, epoch)
            if len(self._orders) > max(_KEPT_ORDERS, 2 * len(self._groups)):
                self._orders.popitem(last=False)
        return self._orders[key]


def round_counts(shares: Sequence[dict[str, float]], documents: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Documents that a round takes of each source, on average over the rounds.

    They are whole numbers (int) where rounding changes a share by less than a hundredth. The largest is 1 or more, so
    that no round is empty.

    Args:
        shares: of each source weight, epochs and tokens, at most one of them not zero. With weights, the round's
            tokens are proportional to them, and the source that its weight asks most of is gone through once.
        documents, tokens: of each source. One without documents has no part in a round.
    """
    if any(share["weight"] for share in shares):
        # Passes of a source in proportion to its weight; the largest becomes 1.
        passes = [share["weight"] / size if size else 0.0 for share, size in zip(shares, tokens, strict=True)]
        largest = max(passes, default=0.0) or 1.0
        passes = [value / largest for value in passes]
    else:
        passes = [
            share["tokens"] / max(1, size) if share["tokens"] else share["epochs"] or 1.0
            for share, size in zip(shares, tokens, strict=True)
        ]
    counts = [value * n for value, n in zip(passes, documents, strict=True)]
    largest = max(counts, default=0.0)
    if 0 < largest < 1:
        counts = [count / largest for count in counts]
    nearest = [round(count) if math.isfinite(count) else count for count in counts]
    return [n if abs(n - count) <= _ROUNDED * count else count for n, count in zip(nearest, counts, strict=True)]


class PreparedSource:
    """Rows of a prepared directory."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        data = config.data
        self._batch_size = config.training.batch_size
        self._data = PreparedData(Path(data.path), tokenizer, "data.path")
        named = self._named(config)
        if not len(named):
            where = data.mixture or data.path
            raise UserError(f"{where}: no source that takes part has a record to train on; name one that has")
        train, self.heldout = self._split(config, tokenizer, named)
        # A document is whole or, for plain text that is longer than a row, a piece.
        longest = data.sequence_length if data.packing == "best_fit" else UNCUT
        inputs = self._data.inputs[train]
        record, self._first, self._lengths = cut(inputs, longest, self._data.prompts[train] == 0)
        self._record = train[record]
        self.heldout_too_long = self.heldout.too_long
        self._too_long = len(train) - len(np.unique(record)) + self.heldout_too_long
        if not len(record):
            raise ConfigError(
                f"data.sequence_length: every training record of {data.mixture or data.path} is longer than a row of "
                f"{data.sequence_length} tokens",
                key="data.sequence_length",
            )
        owner = self._data.sources[self._record]
        names, shares = self._shares(config)
        groups = [np.flatnonzero(owner == self._data.names.index(name)) for name in names]
        tokens = [int(self._lengths[group].sum()) for group in groups]
        counts = round_counts(shares, [len(group) for group in groups], tokens)
        _check_round(config, counts, groups)
        rounds = Rounds(groups, counts, config.run.seed)
        self._rows = EpochRows(self._lengths, data.sequence_length, config.run.seed, rounds, data.packing)
        split = f"heldout {data.heldout_records}" if not data.heldout_path else f"heldout {self._heldout_identity}"
        if not data.heldout_path and len(named) < len(self._data):
            split += " of what takes part"
        self.identity = f"prepared {self._data.identity} {split} {list(zip(names, counts, strict=True))}"
        self.summary = self._summarize(len(named), names, groups, tokens, counts, rounds, data.sequence_length)

    @property
    def harder(self) -> DocumentList:
        """None: prepared data have no difficulty."""
        return []

    def rows(self, step: int, elements: Sequence[int]) -> list[list[Document]]:
        """Rows step * B + element of the endless stream of rounds."""
        first = step * self._batch_size
        rows = [self._rows.pieces(first + element) for element in elements]
        records = [int(self._record[piece.document]) for row in rows for piece in row]
        tokens = iter(self._data.tokens(records))
        return [
            [
                Document(next(tokens), int(self._data.prompts[self._record[document]])).part(
                    int(self._first[document]) + start, length
                )
                for document, start, length in row
            ]
            for row in rows
        ]

    def epoch(self, step: int) -> int:
        """The round of the step's first row."""
        return self._rows.epoch(step * self._batch_size)

    def _split(self, config: Config, tokenizer: Tokenizer, named: np.ndarray) -> tuple[np.ndarray, _PreparedDocuments]:
        """Of the records of sources that take part, those to train on, and held-out documents."""
        data = config.data
        if data.heldout_path:
            other = PreparedData(Path(data.heldout_path), tokenizer, "data.heldout_path")
            self._heldout_identity, heldout = other.identity, np.arange(len(other))
            train = named
        else:
            other = self._data
            train, heldout = split_records(len(named), data.heldout_records, data.path)
            train, heldout = named[train], named[heldout]
        documents = _PreparedDocuments(other, heldout, data.sequence_length)
        if len(heldout) and not len(documents):
            raise ConfigError(
                f"data.sequence_length: every held-out record of {data.heldout_path or data.path} is longer than a row "
                f"of {data.sequence_length} tokens",
                key="data.sequence_length",
            )
        return train, documents

    def _named(self, config: Config) -> np.ndarray:
        """The records of the sources that take part: nothing is held out of the others either."""
        if not config.data.mixture:
            return np.arange(len(self._data))
        numbers = [self._data.names.index(name) for name in self._shares(config)[0]]
        return np.flatnonzero(np.isin(self._data.sources, numbers))

    def _shares(self, config: Config) -> tuple[list[str], list[dict[str, float]]]:
        """Names of the sources that take part, and their shares."""
        index: dict[str, Any] = self._data.index["sources"]
        kinds = ("weight", "epochs", "tokens")
        if not config.data.mixture:
            names = [name for name in self._data.names if index[name]["records"]]
            return names, [{kind: float(index[name][kind]) for kind in kinds} for name in names]
        wanted = load_mixture(config.data.mixture).sources
        for name in wanted:
            if name not in index:
                raise UserError(
                    f"data.mixture: {config.data.mixture} names the source {name}, which {config.data.path} lacks; "
                    f"it holds {', '.join(index)}"
                )
        names = [name for name in wanted if index[name]["records"]]
        return names, [{kind: float(getattr(wanted[name], kind)) for kind in kinds} for name in names]

    def _summarize(
        self,
        records: int,
        names: list[str],
        groups: list[np.ndarray],
        tokens: list[int],
        counts: list[float],
        rounds: Rounds,
        row_length: int,
    ) -> str:
        each = [
            count * size / len(group) if len(group) else 0.0
            for count, size, group in zip(counts, tokens, groups, strict=True)
        ]
        total, rows = sum(each), self._rows.rows_in_epoch(0)
        first = int(self._lengths[rounds(0)].sum())  # a round holds about the total, not just that
        parts = ", ".join(
            f"{name} {size / total:.1%} ({count / max(1, len(group)):.2f} epochs)"
            for name, size, count, group in zip(names, each, counts, groups, strict=True)
        )
        return (
            f"prepared data, {records:,} records, {self.heldout.records:,} held out; a round: {parts}; "
            f"about {total:,.0f} tokens in {rows:,} rows ({first / (rows * row_length):.0%} full), "
            f"{self._too_long:,} too long for a row"
        )


def _check_round(config: Config, counts: list[float], groups: list[np.ndarray]) -> None:
    """That a round holds something, and no more than can be planned."""
    where = config.data.mixture or config.data.path
    documents = sum(map(len, groups))
    if sum(counts) > max(LARGEST_ROUND, documents):
        raise UserError(
            f"{where}: a round of these shares holds {sum(counts):.3g} documents ({documents:,} different ones), more "
            f"than the {LARGEST_ROUND:,} that are planned at once; lower the sources' epochs or tokens"
        )


class _PreparedDocuments:
    """Some records as documents of at most row_length inputs, read when they are asked for.

    Longer plain text is cut. Of the `records` those that have prompts and are longer are left out, also where packing
    concat cuts those of training, for a piece of an answer is none; they are counted in `too_long`.
    """

    def __init__(self, data: PreparedData, records: np.ndarray, row_length: int):
        self._data = data
        inputs, prompts = data.inputs[records], data.prompts[records]
        of_record, self._first, self._lengths = cut(inputs, row_length, prompts == 0)
        self._record = records[of_record]
        self.records, self.too_long = len(records), len(records) - len(np.unique(of_record))

    def __len__(self) -> int:
        return len(self._record)

    def __getitem__(self, index: int) -> Document:
        whole = self._data.document(int(self._record[index]))
        return whole.part(int(self._first[index]), int(self._lengths[index]))
