"""Where documents come from: a task generator, or JSONL files (prepared data: data/mixing.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.data import tasks
from dreamer_jax.data.jsonl import JsonlReader, Template
from dreamer_jax.data.packing import EpochRows, permutation
from dreamer_jax.data.records import Document, Documents, Record, TokenStore
from dreamer_jax.data.task_steps import steps_of
from dreamer_jax.data.tokenizers import Tokenizer, encode_pair
from dreamer_jax.errors import ConfigError, UserError

_SPLIT_SEED = 20_260_421  # of the held-out split, so that runs of every seed are compared on the same records


UNCUT = 1 << 40


class DocumentList(Protocol):
    """Documents by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Document: ...


class Source(Protocol):
    """Training rows, held-out documents, and what decides them."""

    summary: str
    identity: str
    """Equal identities (with equal seeds and shapes) mean equal batches."""

    @property
    def heldout(self) -> DocumentList:
        """Documents that training never sees."""
        ...

    @property
    def heldout_too_long(self) -> int:
        """Held-out records that were left out, being longer than a row."""
        ...

    @property
    def harder(self) -> DocumentList:
        """Documents of difficulty evaluation.harder, which training never sees either."""
        ...

    def rows(self, step: int, elements: Sequence[int]) -> list[list[Document]]:
        """Documents of some rows of step `step`, each a pure function of (run.seed, step, element)."""
        ...

    def epoch(self, step: int) -> int:
        """How many times the data have been gone through before this step's first row."""
        ...


class TaskSource:
    """Instances of a built-in task, drawn anew for every row from (run.seed, step, element)."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        data = config.data
        self._task, self._difficulty = data.task, data.difficulty
        self._seed, self._row_length = config.run.seed, data.sequence_length
        self._tokenizer = tokenizer
        self._asks_for_steps = config.recurrence.steps > 0
        self._check(data.difficulty, "data.difficulty")
        self.heldout_too_long = 0  # `_check` has seen to it
        self.heldout: DocumentList = [self._heldout("heldout", i, None) for i in range(data.heldout_records)]
        self.harder: DocumentList = []
        if config.evaluation.harder:
            self._check(config.evaluation.harder, "evaluation.harder")
            self.harder = [self._heldout("harder", i, config.evaluation.harder) for i in range(data.heldout_records)]
        self.identity = f"task {data.task} {data.difficulty} version {tasks.VERSION}"
        self.summary = f"task {data.task}, difficulty 1 to {data.difficulty}, {len(self.heldout):,} instances held out"
        if self.harder:
            self.summary += f", {len(self.harder):,} of difficulty {config.evaluation.harder}"

    def rows(self, step: int, elements: Sequence[int]) -> list[list[Document]]:
        """Rows of new instances."""
        return [self._row(step, element) for element in elements]

    def epoch(self, step: int) -> int:
        """Instances are drawn anew, so this is always 0."""
        return 0

    def _row(self, step: int, element: int) -> list[Document]:
        """Instances until one doesn't fit into the row any more."""
        rng = Random(f"train {self._seed} {step} {element}")
        documents, used = [], 0
        while True:
            difficulty = rng.randint(1, self._difficulty)
            record = tasks.draw(self._task, difficulty, rng, heldout=False)
            document = to_document(record, self._tokenizer)
            used += len(document.tokens) - 1
            if used > self._row_length:
                return documents
            documents.append(self._with_steps(document, record) if self._asks_for_steps else document)

    def _with_steps(self, document: Document, record: Record) -> Document:
        """With the results of its steps: a token is a byte, and bos comes before the first."""
        found = steps_of(self._task, record.prompt)
        steps = ((step.place + 1, step.number, self._tokenizer.encode(step.result)[0]) for step in found)
        return document._replace(steps=tuple(steps))

    def _heldout(self, kind: str, index: int, difficulty: int | None) -> Document:
        rng = Random(f"{kind} {index}")
        record = tasks.draw(self._task, difficulty or rng.randint(1, self._difficulty), rng, heldout=True)
        return to_document(record, self._tokenizer)

    def _check(self, difficulty: int, key: str) -> None:
        task = tasks.TASKS[self._task]
        if difficulty > task.hardest:
            raise ConfigError(f"{key}: {difficulty} is more than {self._task} has; at most {task.hardest}", key=key)
        # A token is at least a byte, and all of a task's characters are single bytes; one more place for bos.
        needed = task.longest(difficulty) + 1
        if needed > self._row_length:
            raise ConfigError(
                f"data.sequence_length: {self._row_length} is too short for {self._task} of difficulty {difficulty} "
                f"({key}); use at least {needed}",
                key="data.sequence_length",
            )


class JsonlSource:
    """Records of a JSONL file, tokenized once and packed anew every epoch."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        data = config.data
        self._batch_size = config.training.batch_size
        skipped: Counter[str] = Counter()
        store = _tokenize(config, data.path, "data.path", tokenizer, skipped)
        if data.heldout_path:
            heldout_store = _tokenize(config, data.heldout_path, "data.heldout_path", tokenizer, skipped)
            train_ids, heldout_ids = np.arange(len(store)), np.arange(len(heldout_store))
        else:
            heldout_store = store
            train_ids, heldout_ids = split_records(len(store), data.heldout_records, data.path)
        twice = data.heldout_path == data.path  # to see what is trained on
        others = train_ids if twice else _without_copies(store, train_ids, heldout_store, heldout_ids)
        if len(others) < len(train_ids):
            skipped["copies of held-out records"] = len(train_ids) - len(others)
        if not len(others):
            raise UserError(f"{data.path}: every record to train on is a copy of one that is held out")
        train_ids = others
        split = data.prompt == ""
        longest = data.sequence_length if data.packing == "best_fit" else UNCUT  # concat cuts at the ends of rows
        self._train = Documents(store, train_ids, longest, split)
        heldout = Documents(heldout_store, heldout_ids, data.sequence_length, split)
        for documents, ids, name in (
            (self._train, train_ids, "training"),
            (heldout, heldout_ids, "held-out"),
        ):
            if len(ids) and not len(documents):
                raise ConfigError(
                    f"data.sequence_length: every {name} record is longer than a row of {data.sequence_length} tokens",
                    key="data.sequence_length",
                )
        self._heldout = heldout
        self._rows = EpochRows(self._train.lengths, data.sequence_length, config.run.seed, packing=data.packing)
        self.identity = f"jsonl {self._train.content_hash()} {heldout.content_hash()}"
        self.summary = self._summarize(len(train_ids), len(heldout_ids), skipped, data.sequence_length)

    @property
    def heldout(self) -> DocumentList:
        """Documents of the held-out records."""
        return self._heldout

    @property
    def heldout_too_long(self) -> int:
        """Held-out records that are longer than a row."""
        return self._heldout.too_long

    @property
    def harder(self) -> DocumentList:
        """None: a file has no difficulty."""
        return []

    def rows(self, step: int, elements: Sequence[int]) -> list[list[Document]]:
        """Rows step * B + element of the endless stream of epochs."""
        first = step * self._batch_size
        return [
            [self._train[i].part(start, length) for i, start, length in self._rows.pieces(first + element)]
            for element in elements
        ]

    def epoch(self, step: int) -> int:
        """The epoch of the step's first row."""
        return self._rows.epoch(step * self._batch_size)

    def _summarize(self, records: int, heldout: int, skipped: Counter[str], row_length: int) -> str:
        tokens, rows = int(self._train.lengths.sum()), self._rows.rows_in_epoch(0)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()))
        too_long = self._train.too_long + self._heldout.too_long
        return (
            f"{records:,} records to train on, {heldout:,} held out; {tokens:,} tokens in {rows:,} rows an epoch "
            f"({tokens / (rows * row_length):.0%} full); {skipped.total():,} skipped{f' ({kinds})' if kinds else ''}, "
            f"{too_long:,} too long for a row"
        )


def to_document(record: Record, tokenizer: Tokenizer) -> Document:
    """The record as `[bos] + prompt + completion + [eos]`, see `encode_pair`."""
    tokens, prompt_length = _to_tokens(record, tokenizer)
    return Document(np.array(tokens, np.int32), prompt_length)


def to_record(document: Document, tokenizer: Tokenizer) -> Record:
    """The text of a document (of a piece, if it is one)."""
    cut = document.prompt_length + 1
    tokens = document.tokens.tolist()
    return Record(tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens[cut:]))


def _to_tokens(record: Record, tokenizer: Tokenizer) -> tuple[list[int], int]:
    prompt, completion = encode_pair(tokenizer, *record)
    return [tokenizer.bos, *prompt, *completion, tokenizer.eos], len(prompt)


def _tokenize(config: Config, path: str, key: str, tokenizer: Tokenizer, skipped: Counter[str]) -> TokenStore:
    data = config.data
    completion = Template(data.completion, "data.completion")
    if not completion.fields:
        raise ConfigError(
            f"data.completion: {data.completion!r} names no field; write one as {json.dumps('{answer}')}",
            key="data.completion",
        )
    reader = JsonlReader(Path(path), key, Template(data.prompt, "data.prompt"), completion, data.on_error)
    store = TokenStore()
    for record in reader:
        store.add(*_to_tokens(record, tokenizer))
    skipped.update(reader.skipped)
    return store


def _without_copies(store: TokenStore, train: np.ndarray, others: TokenStore, heldout: np.ndarray) -> np.ndarray:
    """The records to train on but those that are held out, too: to the token, prompt and completion."""
    apart = set(_contents(others, heldout))
    pairs = zip(train.tolist(), _contents(store, train), strict=True)
    return np.array([record for record, content in pairs if content not in apart], train.dtype)


def _contents(store: TokenStore, records: np.ndarray) -> Iterator[bytes]:
    ends, tokens = np.frombuffer(store.ends, np.int64), np.frombuffer(store.tokens, np.int32)
    for record in records.tolist():
        yield tokens[ends[record - 1] if record else 0 : ends[record]].tobytes()


def split_records(records: int, heldout: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices (training in file order, held-out): the last of a shuffle that no run's seed changes."""
    if not records:
        raise UserError(f"{path}: has no usable record")
    if heldout >= records:
        raise UserError(
            f"{path}: has {records} usable records, too few to hold out data.heldout_records {heldout} and train on "
            "the rest; lower it, or name a file with data.heldout_path"
        )
    order = permutation(records, _SPLIT_SEED)
    return np.sort(order[: records - heldout]), order[records - heldout :]
