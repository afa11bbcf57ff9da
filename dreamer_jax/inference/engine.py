"""Prompts in, tokens out: batches of any lengths, one compilation for each bucket of shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dreamer_jax.errors import UserError, whole
from dreamer_jax.inference.batches import Finished, Generated, RowBatch, bucket, chunk, fetch, padded
from dreamer_jax.inference.model import FoldedModel, check_generates, fold
from dreamer_jax.inference.programs import Kinds, programs_for
from dreamer_jax.inference.samplers import Sampler, Static
from dreamer_jax.inference.samplers.contract import DECODE_BLOCK
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.inference.sharding import by_rows, shard

if TYPE_CHECKING:
    from dreamer_jax.runs.models import TrainedModel


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
        sampler: how tokens go through the depths (docs/samplers.md); by default each takes all, or those it needs by
            the rule of a family that halts. Prompts always go through all.
        mesh: devices to share the rows and, along an axis `expert`, the experts (see `sharding`); None for one.

    Raises:
        UserError: the sampler needs what the model hasn't, or isn't one.
    """

    def __init__(self, model: FoldedModel, sampler: Sampler | None = None, mesh: Mesh | None = None):
        if not isinstance(sampler, Sampler | None):
            raise UserError(f"sampler {sampler!r} is none; make one, such as dreamer_jax.inference.Adaptive()")
        self.sampler = (sampler or Static()).for_model(model)
        self.exits_early = self.sampler.early or model.family.flags.halts
        """Whether a token may stop before the last depth."""
        model, sharding = (by_rows(model), None) if mesh is None else shard(model, mesh)
        self.model, self.mesh = model, sharding and sharding.mesh
        self._programs = programs_for(sharding)
        self._row_shards = 1 if sharding is None else sharding.row_shards
        # One program hardly uses more than one core of a CPU: its steps are small and wait for each other.
        alone = mesh is None and jax.default_backend() == "cpu"
        self._most_batches = _cores() if alone else 1

    @classmethod
    def of(
        cls,
        trained: TrainedModel,
        depth: int | None = None,
        dtype: str | None = None,
        sampler: Sampler | None = None,
        mesh: Mesh | None = None,
        int8: bool = False,
    ) -> Engine:
        """The engine of a checkpoint (`load_run`); `depth`, `dtype` and `int8` as of `fold`."""
        check_generates(trained.config)
        return cls(fold(trained.config.model, trained.params, trained.model_state, depth, dtype, int8), sampler, mesh)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        finished: Finished | None = None,
        batch_size: int = 16,
        numbers: Sequence[int] | None = None,
    ) -> list[Generated]:
        """Continue prompts, those of similar length together.

        Args:
            prompts: token ids, at least one a row.
            max_tokens: most tokens a row gets.
            sampling: greedy by default.
            stop_ids: tokens that end a row.
            finished: asked after every few tokens about each row that goes on.
            batch_size: rows computed at once.
            numbers: of the rows, which the draws depend on; by default 0, 1, ...
        """
        batch_size = whole(batch_size, "batch_size", 1)
        numbers = range(len(prompts)) if numbers is None else numbers
        results: list[Generated | None] = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            chosen = [prompts[row] for row in rows]
            of_row = None if finished is None else lambda i, tokens, rows=rows: finished(rows[i], tokens)
            own = [numbers[row] for row in rows]
            stream = self.stream(chosen, max_tokens, sampling, stop_ids, of_row, numbers=own)
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
        block: int = DECODE_BLOCK,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[list[Generated]]:
        """Continue one batch of prompts; yields the rows as they grow, the same objects every time.

        Args:
            prompts, max_tokens, sampling, stop_ids, finished: as of `generate`.
            block: tokens between two yields, at most `DECODE_BLOCK`; some samplers bring a few more. The first comes
                after one token.
            numbers: of the rows, which the draws depend on; by default 0, 1, ...
        """
        _check(prompts, self.model.config.vocab_size)
        max_tokens = whole(max_tokens, "max_tokens", 1)
        if not prompts:
            return
        shares, size = self._shares(len(prompts))
        numbers = range(len(prompts)) if numbers is None else numbers
        settings = max_tokens, sampling or Sampling(), stop_ids, self.sampler
        batches = [RowBatch(self.model, self._programs, prompts[own], numbers[own], size, *settings) for own in shares]
        rows = [row for batch in batches for row in batch.rows]
        running = batches
        _each(RowBatch.begin, running)
        while True:
            if finished is not None:
                for batch, own in zip(batches, shares, strict=True):
                    batch.end(finished, own.start)
            yield rows
            running = [batch for batch in running if not batch.done]
            if not running:
                return
            _each(lambda batch: batch.advance(min(block, DECODE_BLOCK)), running)

    def score(self, rows: Sequence[Sequence[int]], batch_size: int = 16) -> list[Scores]:
        """Log-probability of every token of each row but the first, given those before it; similar lengths together."""
        _check(rows, self.model.config.vocab_size)
        batch_size = whole(batch_size, "batch_size", 1)
        results: list[Scores | None] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            shares, size = self._shares(len(chosen))
            pieces = [[rows[row] for row in chosen[own]] for own in shares]
            scored = _each(functools.partial(self._score, size=size), pieces)
            for row, scores in zip(chosen, itertools.chain(*scored), strict=True):
                results[row] = scores
        return [result for result in results if result is not None]

    def _score(self, rows: Sequence[Sequence[int]], size: int) -> list[Scores]:
        longest = max(len(row) for row in rows)
        width = chunk(size, longest, self.model.family.flags.depths_apart)
        tokens = padded(rows, size, -(-longest // width) * width + 1)
        slots = self._programs.empty_slots(self.model, size, bucket(longest))
        pieces = []
        for start in range(0, longest, width):
            inputs, targets = tokens[:, start : start + width], tokens[:, start + 1 : start + width + 1]
            logprobs, greedy, slots = self._programs.score(
                Kinds(), self.model, inputs, targets, jnp.int32(start), slots
            )
            pieces.append(fetch(logprobs, greedy))
        logprobs, greedy = (np.concatenate(piece, axis=1) for piece in zip(*pieces, strict=True))
        return [Scores(logprobs[i, : len(row) - 1], greedy[i, : len(row) - 1]) for i, row in enumerate(rows)]

    def _shares(self, count: int) -> tuple[list[slice], int]:
        """Which of `count` rows go together, and B for them: a bucket that divides over the devices."""
        batches = min(self._most_batches, count)
        ends = [count * n // batches for n in range(batches + 1)]
        largest = -(-count // batches)
        size = self._row_shards * bucket(-(-largest // self._row_shards), 1)
        return [slice(start, end) for start, end in itertools.pairwise(ends)], size


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What a function makes of each item, of several in a thread each."""
    if len(items) == 1:
        return [function(items[0])]
    return list(_threads().map(function, items))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores())


def _check(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    for i, row in enumerate(rows):
        if not len(row):
            raise UserError(f"row {i} is empty; begin it with the begin-of-text token")
        if min(row) < 0 or max(row) >= vocab_size:
            raise UserError(f"row {i} has a token outside the model's vocabulary of {vocab_size}")
