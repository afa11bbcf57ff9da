"""What the data room passes around: texts, token documents and batches."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]
"""Arrays of shape [B, S] by name; packing.assemble says what each one holds."""


class Record(NamedTuple):
    """One example as text: what is given, and what is to be written."""

    prompt: str
    completion: str


class Document(NamedTuple):
    """One example as tokens: `[bos] + prompt + completion + [eos]`, or a piece of that for long plain text.

    tokens: int32 [n + 1]; the n inputs are all but the last token, the n targets all but the first.
    prompt_length: tokens of the prompt, which is also the index of the first target of the completion.
    """

    tokens: np.ndarray
    prompt_length: int


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


class Documents:
    """The documents of some records of a TokenStore: a view that copies no tokens.

    Args:
        store: the tokenized records.
        records: int64 [m], which records, in order.
        row_length: S; a document has at most S inputs.
        split: cut a longer record into pieces of S inputs, each a document of its own, so that every target is
            kept exactly once (only the first piece starts with bos, only the last ends with eos). Otherwise a
            longer record is left out and counted in `too_long`.
    """

    def __init__(self, store: TokenStore, records: np.ndarray, row_length: int, split: bool):
        ends = np.frombuffer(store.ends, np.int64) if len(store) else np.zeros(0, np.int64)
        starts = np.concatenate([[0], ends[:-1]])[records] if len(records) else np.zeros(0, np.int64)
        inputs = (ends[records] - starts - 1).astype(np.int64)
        prompts = np.frombuffer(store.prompt_lengths, np.int32)[records] if len(records) else np.zeros(0, np.int32)
        if split:
            pieces = -(-inputs // row_length)
            piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts = np.repeat(starts, pieces) + piece * row_length
            inputs = np.minimum(np.repeat(inputs, pieces) - piece * row_length, row_length)
            prompts = np.repeat(prompts, pieces)
            self.too_long = 0
        else:
            fits = inputs <= row_length
            starts, inputs, prompts = starts[fits], inputs[fits], prompts[fits]
            self.too_long = int(len(fits) - fits.sum())
        self._tokens = np.frombuffer(store.tokens, np.int32) if len(store) else np.zeros(0, np.int32)
        self._starts = starts
        self._prompts = prompts
        self.lengths = inputs
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
            tokens, prompt_length = self[index]
            digest.update(f"{len(tokens)} {prompt_length} ".encode())
            digest.update(np.ascontiguousarray(tokens, "<i4").tobytes())
        return digest.hexdigest()
