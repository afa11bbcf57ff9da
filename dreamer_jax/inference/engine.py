"""Prompts in, tokens out: batches of any lengths, one compilation for each bucket of shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dreamer_jax.config.errors import UserError
from dreamer_jax.inference.model import FoldedModel, fold
from dreamer_jax.inference.placement import place
from dreamer_jax.inference.programs import BLOCK, Kinds, programs_for
from dreamer_jax.inference.sampling import Sampling

if TYPE_CHECKING:
    from dreamer_jax.training.checkpoints import TrainedModel

Finished = Callable[[int, list[int]], bool]
"""(number of the row, its tokens so far) -> whether it is to end here, for stops that only the text shows."""

CHUNK_TOKENS = 4096
"""Prompt tokens of all rows that are computed at once."""
SHORTEST = 16
"""Smallest bucket of lengths."""


@dataclasses.dataclass
class Generated:
    """One generated row.

    Attributes:
        tokens: without the prompt and without the stop token.
        depths: how many depths each token's predecessor went through; the first is always the full depth.
        finish: "stop": a stop token came, or `finished` said so. "length": `max_tokens` are reached.
    """

    tokens: list[int]
    depths: list[int]
    finish: str = "length"


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model thinks of a row of n tokens.

    Attributes:
        logprobs: [n - 1] float32, natural logarithm of the probability of each token after the first.
        greedy: [n - 1] bool, whether that token is the likeliest one.
    """

    logprobs: np.ndarray
    greedy: np.ndarray


class Engine:
    """Generates from and scores token rows with a folded model.

    Args:
        model: see `fold`.
        exit_distance: a token stops going deeper when its hidden state moves by less than this, relative to its norm
            (see `programs.until_settled`); 0 takes every token through all depths. Prompts always go through all.
        mesh: devices to share the rows and, along an axis `expert`, the experts (see `placement`); None for one.

    Raises:
        UserError: early exit from a model whose depths are different layers.
    """

    def __init__(self, model: FoldedModel, exit_distance: float = 0.0, mesh: Mesh | None = None):
        if exit_distance > 0 and not model.config.recurrent:
            raise UserError(f"early exit needs a recurrent model; {model.config.variant} has distinct layers")
        placement = None
        if mesh is not None:
            model, placement = place(model, mesh)
        self.model = model
        self._programs = programs_for(placement)
        self._row_shards = 1 if placement is None else placement.row_shards
        self._exit_distance = exit_distance

    @classmethod
    def of(
        cls,
        trained: TrainedModel,
        depth: int | None = None,
        dtype: str | None = None,
        exit_distance: float = 0.0,
        mesh: Mesh | None = None,
    ) -> Engine:
        """The engine of a checkpoint (`load_run`); `depth` and `dtype` as of `fold`."""
        return cls(fold(trained.config.model, trained.params, trained.balancing, depth, dtype), exit_distance, mesh)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        finished: Finished | None = None,
        batch_size: int = 16,
        first_number: int = 0,
    ) -> list[Generated]:
        """Continue prompts, those of similar length together.

        Args:
            prompts: token ids, at least one a row.
            max_tokens: most tokens a row gets.
            sampling: greedy by default.
            stop_ids: tokens that end a row.
            finished: asked after every few tokens about each row that goes on.
            batch_size: rows computed at once.
            first_number: of the first row, where more than one call makes a whole; draws depend on a row's number.
        """
        results: list[Generated | None] = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            chosen = [prompts[row] for row in rows]
            of_row = None if finished is None else lambda i, tokens, rows=rows: finished(rows[i], tokens)
            numbers = [first_number + row for row in rows]
            stream = self.stream(chosen, max_tokens, sampling, stop_ids, of_row, numbers=numbers)
            for row, generated in zip(rows, list(stream)[-1], strict=True):
                results[row] = generated
        return [result for result in results if result is not None]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        finished: Finished | None = None,
        block: int = BLOCK,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[list[Generated]]:
        """Continue one batch of prompts; yields the rows as they grow, the same objects every time.

        Args:
            prompts, max_tokens, sampling, stop_ids, finished: as of `generate`.
            block: tokens between two yields, at most `programs.BLOCK`. The first comes after one token.
            numbers: of the rows, which the draws depend on; by default 0, 1, ...
        """
        sampling = sampling or Sampling()
        _check(prompts, self.model.config.vocab_size)
        if max_tokens < 1:
            raise UserError(f"max_tokens {max_tokens}: must be 1 or more")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        size = self._rows(len(prompts))
        lengths = np.pad(lengths, (0, size - len(prompts)), constant_values=1)
        row_numbers = np.array(range(len(prompts)) if numbers is None else numbers, np.int32)
        row_numbers = np.pad(row_numbers, (0, size - len(prompts)))
        limits = np.where(np.arange(size) < len(prompts), lengths + max_tokens - 1, 0).astype(np.int32)
        kinds = Kinds(sampling.draws, sampling.ranks, self._exit_distance > 0)
        ends = jnp.asarray(list(stop_ids) or [-1], jnp.int32)

        hidden, caches = self._prefill(prompts, lengths, _bucket(int(lengths.max()) + max_tokens))
        settings = sampling.numbers()
        progress = self._programs.first(kinds, self.model, hidden, lengths, row_numbers, limits, ends, settings)
        rows = [Generated([], []) for _ in prompts]
        new = np.asarray(progress.last)[:, None]
        taken = np.full_like(new, self.model.total_depth)
        while True:
            self._extend(rows, new, taken, stop_ids)
            stopped = [row.finish == "stop" for row in rows]
            if finished is not None:
                running = ~np.asarray(progress.done)
                for i, row in enumerate(rows):
                    if running[i] and finished(i, row.tokens):
                        row.finish, stopped[i] = "stop", True
                done = np.asarray(progress.done) | np.pad(stopped, (0, size - len(rows)), constant_values=True)
                progress = progress._replace(done=jnp.asarray(done))
            yield rows
            if np.asarray(progress.done).all():
                return
            new, taken, progress, caches = self._programs.decode(
                kinds,
                self.model,
                progress,
                caches,
                jnp.int32(min(block, BLOCK)),
                ends,
                settings,
                jnp.float32(self._exit_distance),
            )
            new, taken = np.asarray(new), np.asarray(taken)

    def score(self, rows: Sequence[Sequence[int]], batch_size: int = 16) -> list[Scores]:
        """Log-probability of every token of each row but the first, given those before it; similar lengths together."""
        _check(rows, self.model.config.vocab_size)
        results: list[Scores | None] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            for row, scores in zip(chosen, self._score([rows[row] for row in chosen]), strict=True):
                results[row] = scores
        return [result for result in results if result is not None]

    def _score(self, rows: Sequence[Sequence[int]]) -> list[Scores]:
        longest = max(len(row) for row in rows)
        size = self._rows(len(rows))
        chunk = _chunk(size, longest)
        tokens = _padded(rows, size, -(-longest // chunk) * chunk + 1)
        caches = self._programs.empty_caches(self.model, size, _bucket(longest))
        parts = []
        for start in range(0, longest, chunk):
            inputs, targets = tokens[:, start : start + chunk], tokens[:, start + 1 : start + chunk + 1]
            logprobs, greedy, caches = self._programs.score(
                Kinds(), self.model, inputs, targets, jnp.int32(start), caches
            )
            parts.append((np.asarray(logprobs), np.asarray(greedy)))
        logprobs, greedy = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        return [Scores(logprobs[i, : len(row) - 1], greedy[i, : len(row) - 1]) for i, row in enumerate(rows)]

    def _prefill(self, prompts: Sequence[Sequence[int]], lengths: np.ndarray, capacity: int) -> Any:
        size, longest = len(lengths), int(lengths.max())
        chunk = _chunk(size, longest)
        tokens = _padded(prompts, size, -(-longest // chunk) * chunk)
        caches = self._programs.empty_caches(self.model, size, capacity)
        hidden = jnp.zeros((size, self.model.config.hidden_size), self.model.config.dtype)
        for start in range(0, longest, chunk):
            starts = np.full(size, start, np.int32)
            hidden, caches = self._programs.prefill(
                Kinds(), self.model, tokens[:, start : start + chunk], starts, lengths, caches, hidden
            )
        return hidden, caches

    def _rows(self, count: int) -> int:
        """B for this many rows: a bucket that divides over the devices."""
        return self._row_shards * _bucket(-(-count // self._row_shards), 1)

    def _extend(self, rows: list[Generated], new: np.ndarray, taken: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Append what a block brought to rows that haven't stopped."""
        for i, row in enumerate(rows):
            if row.finish == "stop":
                continue
            for token, depth in zip(new[i].tolist(), taken[i].tolist(), strict=True):
                if token < 0:
                    break
                if token in stop_ids:
                    row.finish = "stop"
                    break
                row.tokens.append(token)
                row.depths.append(depth)


def _bucket(count: int, smallest: int = SHORTEST) -> int:
    """The smallest power of two, or one and a half, that is at least `count`."""
    size = smallest
    while size < count:
        size = size * 3 // 2 if size * 3 // 2 >= count and size > 1 else size * 2
    return size


def _chunk(rows: int, longest: int) -> int:
    """Prompt positions to compute at once: a bucket, or the power of two that `CHUNK_TOKENS` allows."""
    return min(_bucket(longest), 1 << max(SHORTEST, CHUNK_TOKENS // rows).bit_length() - 1)


def _padded(rows: Sequence[Sequence[int]], size: int, length: int) -> np.ndarray:
    tokens = np.zeros((size, length), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


def _check(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    for i, row in enumerate(rows):
        if not len(row):
            raise UserError(f"row {i} is empty; begin it with the begin-of-text token")
        if min(row) < 0 or max(row) >= vocab_size:
            raise UserError(f"row {i} has a token outside the model's vocabulary of {vocab_size}")
