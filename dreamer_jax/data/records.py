"""What the data room passes around: texts, token documents and batches."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]
"""Arrays of shape [B, S] by name, see packing.assemble; those of puzzles have more, see puzzles.source.batch_of."""


class Record(NamedTuple):
    """One example as text: what is given, and what is to be written."""

    prompt: str
    completion: str


class Document(NamedTuple):
    """One example as tokens: `[bos] + prompt + completion + [eos]`, or a piece of that for long plain text.

    tokens: int32 [n + 1]; the n inputs are all but the last token, the n targets all but the first.
    prompt_length: tokens of the prompt, which is also the index of the first target of the completion.
    steps: (input, number of the step, token of its result) of each step of a task's problem, where they are asked for.
    """

    tokens: np.ndarray
    prompt_length: int
    steps: tuple[tuple[int, int, int], ...] = ()

    def part(self, first: int, length: int) -> Document:
        """The document of `length` inputs that begins at input `first` of this one."""
        tokens = self.tokens[first : first + length + 1]
        return Document(tokens, min(max(0, self.prompt_length - first), length))


@dataclass
class TokenStore:
    """Records as tokens in one flat int32 array (four bytes a token), in the order they were added."""

    tokens: array = field(default_factory=lambda: array("i"))
    ends: array = field(default_factory=lambda: array("q"))
    prompt_lengths: array = field(default_factory=lambda: array("i"))

    def add(self, tokens: list[int], prompt_length: int) -> None:
        """Append one whole record: bos, prompt, completion, eos."""
        self.tokens.extend(tokens)
        self.ends.append(len(self.tokens))
        self.prompt_lengths.append(prompt_length)

    def __len__(self) -> int:
        return len(self.ends)


def cut(inputs: np.ndarray, row_length: int, split: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents of at most row_length inputs from records of any length.

    Args:
        inputs: int64 [n], inputs of each record.
        row_length: S.
        split: bool [n]. A longer record is cut into pieces of S inputs, each a document of its own, so that every
            target is kept exactly once (only the first piece starts with bos, only the last ends with eos); where
            this is False it is left out.
    Returns:
        Of each document, int64 [m]: its record, its first input in the record, its inputs.
    """
    pieces = np.where(split, -(-inputs // row_length), inputs <= row_length).astype(np.int64)
    record = np.repeat(np.arange(len(inputs)), pieces)
    first = (np.arange(len(record)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * row_length
    return record, first, np.minimum(inputs[record] - first, row_length)


class Documents:
    """The documents of some records of a TokenStore: a view that copies no tokens.

    Args:
        store: the tokenized records.
        records: int64 [m], which records, in order.
        row_length: S; a document has at most S inputs.
        split: what happens to longer records, see `cut`; those left out are counted in `too_long`.
    """

    def __init__(self, store: TokenStore, records: np.ndarray, row_length: int, split: bool):
        ends = np.frombuffer(store.ends, np.int64) if len(store) else np.zeros(0, np.int64)
        starts = np.concatenate([[0], ends[:-1]])[records] if len(records) else np.zeros(0, np.int64)
        inputs = (ends[records] - starts - 1).astype(np.int64)
        prompts = np.frombuffer(store.prompt_lengths, np.int32)[records] if len(records) else np.zeros(0, np.int32)
        of_record, firsts, lengths = cut(inputs, row_length, np.full(len(inputs), split))
        self.too_long = len(inputs) - len(np.unique(of_record))
        self._tokens = np.frombuffer(store.tokens, np.int32) if len(store) else np.zeros(0, np.int32)
        self._starts = starts[of_record] + firsts
        self._prompts = prompts[of_record]
        self.lengths = lengths
        """int64 [len(self)]: inputs of each document, the places it takes in a row."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        start = int(self._starts[index])
        tokens = self._tokens[start : start + int(self.lengths[index]) + 1]
        return Document(tokens, int(self._prompts[index]))

    def content_hash(self) -> str:
        """SHA-256 of all tokens and borders, in order."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            tokens, prompt_length, _ = self[index]
            digest.update(f"{len(tokens)} {prompt_length} ".encode())
            digest.update(np.ascontiguousarray(tokens, "<i4").tobytes())
        return digest.hexdigest()
