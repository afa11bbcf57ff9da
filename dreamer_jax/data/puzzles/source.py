"""Batches of a puzzle: instances as a pure function of (seed, step, row), on two sides that never share one.

As with the built-in tasks, a hash of the instance puts it into one of HELDOUT_SHARE shares, one of which is held out
for every seed. An instance on the wrong side is drawn again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from dreamer_jax.config.puzzle import PuzzleConfig
from dreamer_jax.data.puzzles import boolean, family, graph
from dreamer_jax.data.records import Batch
from dreamer_jax.data.tasks import HELDOUT_SHARE
from dreamer_jax.errors import ConfigError

VERSION = 2
"""Goes into the fingerprint of the data; raised whenever the same seed would give other instances."""

TRAINING, HELDOUT, CELL = range(3)
"""The streams of random numbers."""


class Draw(NamedTuple):
    """What decides instances beside the attempt and the row.

    Attributes:
        stream: one of those above.
        seed: of the run; held-out instances are the same for all runs.
        step: of training; of a cell, its depth.
        easiest, hardest: between them each row draws its depth.
    """

    stream: int
    seed: int
    step: int
    easiest: int
    hardest: int


class Instances(NamedTuple):
    """Instances as arrays, with the letters of a batch.

    Attributes:
        tokens: [B, S] int32.
        lengths: [B], real tokens.
        read: [B, R] int32, positions that are read out.
        visible: [B, S, S] bool, or None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    read: np.ndarray
    visible: np.ndarray | None = None


class Task(NamedTuple):
    """A task as its settings have it.

    Attributes:
        vocabulary: the words of the tokens.
        easiest, hardest: depths that there are.
        longest: depth -> the most tokens.
        reads: R.
        draw: (draw, rows [B], labels [B], attempt, S) -> instances.
    """

    vocabulary: tuple[str, ...]
    easiest: int
    hardest: int
    longest: Callable[[int], int]
    reads: int
    draw: Callable[[Draw, np.ndarray, np.ndarray, int, int], Instances]


class PuzzleSource:
    """Batches of the task that a section data.puzzle describes.

    Args:
        config: that section.
        length: S.
    Raises:
        ConfigError: the task has no instances so shallow or so deep, or rows are too short for them.
    """

    def __init__(self, config: PuzzleConfig, length: int):
        self._config, self._length = config, length
        self._task = _TASKS[config.task](config)
        self.check(config.easiest, "data.puzzle.easiest")
        self.check(config.difficulty, "data.puzzle.difficulty")
        self.tokenizer = WordTokenizer(self._task.vocabulary)
        self.identity = f"puzzle {config} version {VERSION}"

    def check(self, difficulty: int, key: str) -> None:
        """Raise unless there are instances of this depth, which a key asks for."""
        task, name = self._task, self._config.task
        if not task.easiest <= difficulty <= task.hardest:
            fix = ""
            if name in _ROOM and difficulty > task.hardest:
                setting, spare = _ROOM[name]
                fix = f"; use at least {difficulty + spare} {setting}"
            found = f"{name} has depths {task.easiest} to {task.hardest}"
            raise ConfigError(f"{key}: {difficulty}, but {found}{fix}", key=key)
        needed = task.longest(difficulty)
        if needed > self._length:
            raise ConfigError(
                f"data.sequence_length: {self._length} is too short for {name} of depth {difficulty} ({key}); use at "
                f"least {needed}",
                key="data.sequence_length",
            )

    def training(self, seed: int, step: int, rows: Sequence[int]) -> Batch:
        """Rows of a step's batch."""
        config = self._config
        return self._batch(Draw(TRAINING, seed, step, config.easiest, config.difficulty), rows, len(rows))

    def heldout(self, rows: range, size: int) -> Batch:
        """Held-out instances of the depths of training; a batch of `size` rows, filled up with empty ones."""
        return self._batch(Draw(HELDOUT, 0, 0, self._config.easiest, self._config.difficulty), rows, size)

    def cell(self, difficulty: int, rows: range, size: int) -> Batch:
        """Held-out instances of exactly this depth, likewise."""
        return self._batch(Draw(CELL, 0, difficulty, difficulty, difficulty), rows, size)

    def _batch(self, draw: Draw, rows: Sequence[int], size: int) -> Batch:
        """[B, ...] arrays; see `batch_of`. Labels take turns, so that every batch and cell is balanced."""
        numbers = np.array(rows, np.int64)
        labels = numbers % 2
        shape = (size, self._length)
        tokens, lengths = np.zeros(shape, np.int32), np.zeros(size, np.int64)
        drawn = Instances(tokens, lengths, np.zeros((size, self._task.reads), np.int32))
        pending, attempt = np.arange(len(numbers)), 0
        while len(pending):
            new = self._task.draw(draw, numbers[pending], labels[pending], attempt, self._length)
            if new.visible is not None and drawn.visible is None:
                empty = np.broadcast_to(np.eye(self._length, dtype=bool), (size, self._length, self._length))
                drawn = drawn._replace(visible=empty.copy())
            right = _is_heldout(new) == (draw.stream != TRAINING)
            for old, values in zip(drawn, new, strict=True):
                if old is not None and values is not None:
                    old[pending[right]] = values[right]
            pending, attempt = pending[~right], attempt + 1
        return batch_of(drawn, labels)


def longest(config: PuzzleConfig, difficulty: int) -> int:
    """Tokens of the longest instance of a depth: S must be so much."""
    return _TASKS[config.task](config).longest(difficulty)


def batch_of(instances: Instances, labels: np.ndarray) -> Batch:
    """The batch of a train or evaluation step.

    Args:
        instances: B of them; a row of length 0 is empty.
        labels: of the first rows, 0 or 1; the others are empty.

    Returns:
        int32: `tokens`; `segment_ids`, 1 or for padding 0; `positions`, 0..S-1; `targets`, the label at the first
        position that is read out, 0 elsewhere, [B, S] each; `read` [B, R]. bool: `loss_mask` and `answer_mask` [B, S],
        true there only; `visible` [B, S, S] of graphs, whether the token of a row sees that of a column.
    """
    size, length = instances.tokens.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (size, length))
    rows = np.arange(len(labels))
    targets, mask = np.zeros((size, length), np.int32), np.zeros((size, length), np.bool_)
    targets[rows, instances.read[rows, 0]] = labels
    mask[rows, instances.read[rows, 0]] = True
    batch = {
        "tokens": instances.tokens,
        "targets": targets,
        "segment_ids": (positions < instances.lengths[:, None]).astype(np.int32),
        "positions": positions.copy(),
        "loss_mask": mask,
        "answer_mask": mask.copy(),
        "read": instances.read,
    }
    return batch if instances.visible is None else {**batch, "visible": instances.visible}


def _is_heldout(instances: Instances) -> np.ndarray:
    """[B] bool: instances that are kept out of all training. Padding doesn't count: rows of every length agree."""

    def share(row: int) -> int:
        length = instances.lengths[row]
        content = instances.tokens[row, :length].tobytes()
        if instances.visible is not None:
            content += np.packbits(instances.visible[row, :length, :length], axis=1).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") % HELDOUT_SHARE

    return np.array([share(row) == 0 for row in range(len(instances.tokens))], bool)


class WordTokenizer:
    """Words between spaces; the first of the vocabulary stands for everything special.

    Args:
        vocabulary: word by id.
    """

    bos = eos = pad = 0

    def __init__(self, vocabulary: Sequence[str]):
        self._words = tuple(vocabulary)
        self._ids = {word: number for number, word in enumerate(self._words)}
        self.vocab_size = len(self._words)
        self.fingerprint = hashlib.sha256("\n".join(self._words).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of the words; unknown ones are left out."""
        return [self._ids[word] for word in text.split() if word in self._ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The words."""
        return " ".join(self._words[number] for number in ids if number)


def _random(draw: Draw, row: int, attempt: int) -> tuple[int, Random]:
    """The depth of a row, and what else it draws."""
    rng = Random(f"puzzle {draw.stream} {draw.seed} {draw.step} {row} {attempt}")
    return rng.randint(draw.easiest, draw.hardest), rng


def _from_words(write: Callable[[Draw, int, int, int], tuple[list[str], tuple[int, ...]]], vocabulary: tuple[str, ...]):
    """`Task.draw` from what writes one instance: (draw, row, label, attempt) -> its words and the positions read."""
    ids = {word: number for number, word in enumerate(vocabulary)}

    def of_rows(draw: Draw, rows: np.ndarray, labels: np.ndarray, attempt: int, length: int) -> Instances:
        pairs = zip(rows.tolist(), labels.tolist(), strict=True)
        written = [write(draw, row, label, attempt) for row, label in pairs]
        tokens = np.zeros((len(rows), length), np.int32)
        for row, (words, _) in zip(tokens, written, strict=True):
            row[: len(words)] = [ids[word] for word in words]
        lengths = np.array([len(words) for words, _ in written])
        return Instances(tokens, lengths, np.array([read for _, read in written], np.int32))

    return of_rows


def _graph(config: PuzzleConfig) -> Task:
    nodes, words = config.nodes, graph.numbers_needed(config.nodes) + 1

    def of_rows(draw: Draw, rows: np.ndarray, labels: np.ndarray, attempt: int, length: int) -> Instances:
        key = [draw.seed, draw.stream]
        drawn = [np.random.Philox(key=key, counter=[0, attempt, row, draw.step]).random_raw(words) for row in rows]
        uniform = (np.array(drawn) >> np.uint64(11)) * 2.0**-53
        hops = draw.easiest + (uniform[:, -1] * (draw.hardest - draw.easiest + 1)).astype(np.int64)
        graphs = graph.draw(uniform[:, :-1], hops, labels, nodes, config.negatives == "leaky")
        room = ((0, 0), (0, length - nodes))
        visible = np.pad(graph.visible(graphs.edges), (*room, room[1])) | np.eye(length, dtype=bool)
        return Instances(np.pad(graph.roles(graphs), room), np.full(len(rows), nodes), graphs.ends, visible)

    return Task(("none", "source", "target"), 1, nodes - graph.SPARE, lambda depth: nodes, 2, of_rows)


def _boolean(config: PuzzleConfig) -> Task:
    def write(draw: Draw, row: int, label: int, attempt: int):
        depth, rng = _random(draw, row, attempt)
        return ["[CLS]", *boolean.write(depth, bool(label), rng)], (0,)

    return Task(boolean.TOKENS, 1, 100, boolean.longest, 1, _from_words(write, boolean.TOKENS))


def _family(config: PuzzleConfig) -> Task:
    most = len(family.NAMES)
    if config.names > most:
        key = "data.puzzle.names"
        raise ConfigError(f"{key}: {config.names}, but there are {most}", key=key)
    if config.facts > config.names - family.SPARE:
        key, enough = "data.puzzle.facts", config.names - family.SPARE
        raise ConfigError(f"{key}: {config.facts}, but {config.names} names are enough for {enough} sentences", key=key)
    if config.contradiction_rate and config.facts <= config.easiest:
        key = "data.puzzle.contradiction_rate"
        problem = f"a chain of {config.easiest} leaves no room for a contradiction in {config.facts} sentences"
        raise ConfigError(f"{key}: {config.contradiction_rate}, but {problem}; use more data.puzzle.facts", key=key)
    style = family.Style(config.facts, config.names, config.voices == "both")

    def write(draw: Draw, row: int, label: int, attempt: int):
        depth, rng = _random(draw, row, attempt)
        contradicted = rng.random() < config.contradiction_rate
        words = family.write(depth, bool(label), style, contradicted, rng).tokens
        first = len(words) - family.SENTENCE
        return words, (first, first + 5)

    longest = family.longest(config.facts)
    return Task(family.TOKENS, 1, config.facts, lambda depth: longest, 2, _from_words(write, family.TOKENS))


_ROOM = {"graph": ("data.puzzle.nodes", graph.SPARE), "family": ("data.puzzle.facts", 0)}
"""The setting that deep instances need more of, and how much of it they need beyond their depth."""
_TASKS: dict[str, Callable[[PuzzleConfig], Task]] = {"graph": _graph, "boolean": _boolean, "family": _family}
