"""The data of a run: batches by step, held-out batches, and the grain pipeline that carries them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.data.mixing import PreparedSource
from dreamer_jax.data.packing import assemble, copied, lay_steps, plan_rows
from dreamer_jax.data.puzzles import PuzzleSource
from dreamer_jax.data.records import Batch, Document, Record
from dreamer_jax.data.sources import DocumentList, JsonlSource, Source, TaskSource, to_record
from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer
from dreamer_jax.errors import ConfigError, UserError

THREADS = 2
"""Threads that prepare batches ahead of the training step."""

PREFETCHED_BATCHES = 8
"""Batches that are ready or being prepared at any time."""


class Data:
    """Everything a run reads. Batches are [B, S] as `packing.assemble` describes; made by `open_data`."""

    tokenizer: Tokenizer
    summary: str
    """One line for the console: records, tokens, fill, skipped, too long."""
    fingerprint: str
    """SHA-256 of all that decides the batches: equal fingerprints mean equal batches at every step."""
    heldout_too_long: int = 0
    """Held-out records that were left out, being longer than a row."""
    copies: int = 1
    """Of each token in a row."""

    def __init__(self, config: Config, tokenizer: Tokenizer, source: Source):
        self.tokenizer = tokenizer
        self.summary = source.summary
        self.heldout_too_long = source.heldout_too_long
        self._source = source
        self._batch_size = config.training.batch_size
        self._row_length, self.copies = config.data.sequence_length, config.data.copies
        self._answer_only = config.data.loss == "answer"
        identity = [
            source.identity,
            tokenizer.fingerprint,
            config.run.seed,
            self._batch_size,
            self._row_length,
            config.data.loss,
        ]
        self._steps = config.data.difficulty if config.recurrence.steps else 0
        if config.data.packing != "best_fit":
            identity.append(config.data.packing)
        if self._steps:
            identity.append("steps")
        if self.copies > 1:
            identity.append(f"{self.copies} copies")
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def batch_at(self, step: int, rows: range | None = None) -> Batch:
        """Training batch of a step (from 0); row i of step s is a pure function of (run.seed, s, i).

        Args:
            step: from 0.
            rows: the rows of the global batch that are wanted, all by default; see `rows_of_process`.
        """
        found = self._source.rows(step, range(self._batch_size) if rows is None else rows)
        batch = self._assemble(found)
        if self._steps:
            batch["step_targets"] = lay_steps(found, self._row_length, self._steps)
        return batch

    def rows_of_process(self, process: int, processes: int) -> range:
        """The rows of the global batch that one of several processes feeds: a slice of its own.

        Raises:
            UserError: the batch can't be cut into so many equal slices.
        """
        if self._batch_size % processes:
            raise UserError(f"training.batch_size {self._batch_size} can't be shared by {processes} processes equally")
        share = self._batch_size // processes
        return range(process * share, (process + 1) * share)

    def epoch_at(self, step: int) -> int:
        """The epoch (for mixtures the round) of the step's first row: the same on every process."""
        return self._source.epoch(step)

    def training_batches(self, start: int, stop: int, rows: range | None = None) -> Iterator[tuple[int, Batch]]:
        """(step, batch) for the steps from start to stop - 1, prepared ahead by grain in threads.

        Closing the iterator (or leaving its loop for good) stops the threads.

        Args:
            start, stop: steps.
            rows: as in `batch_at`.
        """
        if start >= stop:
            return
        try:
            import grain
        except ImportError:
            raise UserError("the training pipeline needs grain; install it with: pip install grain") from None
        steps = grain.MapDataset.range(start, stop).map(lambda step: (int(step), self.batch_at(int(step), rows)))
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=PREFETCHED_BATCHES)
        iterator = iter(steps.to_iter_dataset(options))
        try:
            yield from iterator
        finally:
            iterator.close()

    def heldout_batches(self) -> Iterator[Batch]:
        """Batches of the held-out documents, each document once, always the same; the last is filled with padding."""
        return self._fixed_batches(self._source.heldout)

    def harder_batches(self) -> Iterator[Batch]:
        """As heldout_batches, of instances of difficulty evaluation.harder; none unless a task sets it."""
        return self._fixed_batches(self._source.harder)

    def heldout_records(self, n: int) -> list[Record]:
        """Up to n of the held-out records, as text."""
        return self._records(self._source.heldout, n)

    def harder_records(self, n: int) -> list[Record]:
        """Up to n of the instances of difficulty evaluation.harder, as text."""
        return self._records(self._source.harder, n)

    def _assemble(self, rows: list[list[Document]]) -> Batch:
        return copied(assemble(rows, self._row_length, self.tokenizer.pad, self._answer_only), self.copies)

    def _fixed_batches(self, documents: DocumentList) -> Iterator[Batch]:
        lengths = np.array([len(documents[i].tokens) - 1 for i in range(len(documents))], np.int64)
        plan = plan_rows(lengths, self._row_length)
        for first in range(0, len(plan), self._batch_size):
            rows = [
                [documents[int(i)] for i in plan[row]] if row < len(plan) else []
                for row in range(first, first + self._batch_size)
            ]
            yield self._assemble(rows)

    def _records(self, documents: DocumentList, n: int) -> list[Record]:
        return [to_record(documents[i], self.tokenizer) for i in range(min(n, len(documents)))]


class PuzzleData(Data):
    """Puzzles of the section data.puzzle. A row is an instance; see `batch_of` for what batches hold.

    Nothing is written or answered in words, so there are no records to show.
    """

    def __init__(self, config: Config):
        self._puzzles = PuzzleSource(config.data.puzzle, config.data.sequence_length)
        self._harder = config.evaluation.harder
        if self._harder:
            self._puzzles.check(self._harder, "evaluation.harder")
        self.tokenizer = self._puzzles.tokenizer
        self._seed, self._batch_size = config.run.seed, config.training.batch_size
        self._instances = config.data.heldout_records
        puzzle = config.data.puzzle
        depths = f"depth {puzzle.easiest} to {puzzle.difficulty}"
        self.summary = f"puzzle {puzzle.task}, {depths}, {self._instances:,} instances held out"
        identity = [self._puzzles.identity, self._seed, self._batch_size, config.data.sequence_length]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def batch_at(self, step: int, rows: range | None = None) -> Batch:
        """Training batch of a step; see `Data.batch_at`."""
        return self._puzzles.training(self._seed, step, range(self._batch_size) if rows is None else rows)

    def epoch_at(self, step: int) -> int:
        """Instances are drawn anew, so this is always 0."""
        return 0

    def heldout_batches(self) -> Iterator[Batch]:
        """Batches of held-out instances of the depths of training, always the same."""
        for rows in self._parts():
            yield self._puzzles.heldout(rows, self._batch_size)

    def harder_batches(self) -> Iterator[Batch]:
        """As heldout_batches, of depth evaluation.harder."""
        for rows in self._parts() if self._harder else ():
            yield self._puzzles.cell(self._harder, rows, self._batch_size)

    def heldout_records(self, n: int) -> list[Record]:
        """None."""
        return []

    def harder_records(self, n: int) -> list[Record]:
        """None."""
        return []

    def _parts(self) -> Iterator[range]:
        for first in range(0, self._instances, self._batch_size):
            yield range(first, min(first + self._batch_size, self._instances))


def open_data(config: Config) -> Data:
    """Open the data of a configuration; a JSONL file is read and tokenized here, once, prepared data are not.

    Raises:
        UserError: a file is missing, empty, broken or too small (the message says which record and what to do).
        ConfigError: the tokenizer doesn't fit model.vocab_size, or a setting can't work.
    """
    if config.data.source == "puzzle":
        puzzles = PuzzleData(config)
        require_vocabulary(config, puzzles.tokenizer, f"puzzle {config.data.puzzle.task}")
        return puzzles
    tokenizer = load_tokenizer(config.data.tokenizer)
    require_vocabulary(config, tokenizer, f"tokenizer {config.data.tokenizer}")
    sources: dict[str, type[TaskSource] | type[JsonlSource] | type[PreparedSource]] = {
        "task": TaskSource,
        "jsonl": JsonlSource,
        "prepared": PreparedSource,
    }
    return Data(config, tokenizer, sources[config.data.source](config, tokenizer))


def require_vocabulary(config: Config, tokenizer: Tokenizer, name: str) -> None:
    """The model must have a row for every id of a tokenizer.

    Raises:
        ConfigError: it has fewer.
    """
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} is too small for {name}, which has {tokenizer.vocab_size} "
            f"ids; set it to {tokenizer.vocab_size} or more",
            key="model.vocab_size",
        )
