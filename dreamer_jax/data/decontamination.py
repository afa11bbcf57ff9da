"""Finding benchmark questions in training text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dreamer_jax.data.words import Grams, WordHashes, grams

LENGTH = 13
"""Words of the n-grams that long questions are compared by."""
SHORTEST = 5
"""A question of fewer different words ("Factor 36-9x^2") is found only when it is the whole text."""

_FILTER_BITS = 22


class Match(NamedTuple):
    """Why a text counts as contaminated."""

    kind: str
    """equal: the same words. contained: all of a question of fewer than 13 words. overlap: enough shared 13-grams."""
    benchmark: str
    question: str


class BenchmarkIndex:
    """The questions of some benchmarks, ready to be looked for.

    Words alone count (words.words): case, punctuation and spacing don't, so that a reformatted question is found.
    A shared 13-gram isn't enough, because template phrases ("Express your answer as a common fraction ...") are
    shared by questions that have nothing else in common: a text must hold `containment` of a question's 13-grams.

    Args:
        benchmarks: name -> questions; a text that matches several counts for the first.
        containment: the share of a question's distinct 13-grams.
    """

    def __init__(self, benchmarks: Mapping[str, Sequence[str]], containment: float):
        self._containment = containment
        self._hashes = WordHashes()
        self._questions = [(name, question) for name, questions in benchmarks.items() for question in questions]
        self._whole: dict[tuple[int, ...], int] = {}  # all words -> the first question that is just that
        short: dict[int, dict[int, int]] = defaultdict(dict)  # number of words -> their n-gram -> question
        long: list[tuple[np.ndarray, int]] = []
        self._sizes = np.zeros(len(self._questions), np.int64)
        for number, (_, question) in enumerate(self._questions):
            of_words = self._hashes.of(question)
            if not of_words:
                continue
            self._whole.setdefault(tuple(of_words), number)
            hashes = np.array(of_words, np.uint64)
            if len(hashes) < LENGTH and len(set(of_words)) >= SHORTEST:
                short[len(hashes)].setdefault(int(grams(hashes, len(hashes))[0]), number)
            found = np.unique(grams(hashes, LENGTH))
            self._sizes[number] = len(found)
            long.append((found, number))
        pairs = [(found, np.full(len(found), number)) for found, number in long]
        keys = np.concatenate([found for found, _ in pairs]) if pairs else np.zeros(0, np.uint64)
        owners = np.concatenate([owner for _, owner in pairs]) if pairs else np.zeros(0, np.int64)
        order = np.argsort(keys, kind="stable")
        self._keys, self._owners = keys[order], owners[order]
        self._long = _Filter(self._keys)
        self._short = dict(short)
        self._short_filters = {
            length: _Filter(np.fromiter(found, np.uint64, len(found))) for length, found in short.items()
        }

    def hashes(self, text: str) -> list[int]:
        """What `find` takes for a text."""
        return self._hashes.of(text)

    def find(self, texts: Sequence[list[int]]) -> list[Match | None]:
        """For each text, the question it contains, or None."""
        found: list[tuple[str, int] | None] = [None] * len(texts)
        for number, text in enumerate(texts):
            question = self._whole.get(tuple(text))
            if question is not None:
                found[number] = ("equal", question)
        all_grams = Grams(texts)
        contained = [
            match for length in sorted(self._short) for match in self._contained(length, *all_grams.of(length))
        ]
        self._find_overlaps(*all_grams.of(LENGTH), found)
        for text, question in contained:
            if found[text] is None:
                found[text] = ("contained", question)
        return [match and Match(match[0], *self._questions[match[1]]) for match in found]

    def _find_overlaps(self, values: np.ndarray, owner: np.ndarray, found: list[tuple[str, int] | None]) -> None:
        hits = np.flatnonzero(self._long.may_hold(values))
        lows, highs = (np.searchsorted(self._keys, values[hits], side) for side in ("left", "right"))
        real = lows < highs
        shared: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for hit, low, high in zip(hits[real].tolist(), lows[real].tolist(), highs[real].tolist(), strict=True):
            for place in range(low, high):
                shared[int(owner[hit])][int(self._owners[place])].add(int(values[hit]))
        for text, questions in shared.items():
            enough = [q for q, common in questions.items() if len(common) >= self._containment * self._sizes[q]]
            if enough and found[text] is None:
                found[text] = ("overlap", min(enough))

    def _contained(self, length: int, values: np.ndarray, owner: np.ndarray) -> Iterator[tuple[int, int]]:
        """(text, question) for the questions of `length` words that are in a text."""
        for hit in np.flatnonzero(self._short_filters[length].may_hold(values)).tolist():
            question = self._short[length].get(int(values[hit]))
            if question is not None:
                yield int(owner[hit]), question

    def sizes(self) -> dict[str, int]:
        """Questions by benchmark."""
        return dict(Counter(name for name, _ in self._questions))


class _Filter:
    """A table of bits that says quickly that most values are not among some keys."""

    def __init__(self, keys: np.ndarray):
        self._table = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._table[self._place(keys)] = True

    def may_hold(self, values: np.ndarray) -> np.ndarray:
        """bool [n]: False where a value is surely not a key."""
        return self._table[self._place(values)]

    @staticmethod
    def _place(values: np.ndarray) -> np.ndarray:
        return (values >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)
