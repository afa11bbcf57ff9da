"""Rows of a batch that one sequence of programs takes along: their prompts, then block after block of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Kinds, Programs
from dreamer_jax.inference.samplers import Sampler
from dreamer_jax.inference.samplers.contract import Asked, Choosing, Progress, Tally
from dreamer_jax.inference.sampling import BROKEN, Sampling

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
        steps: depth steps that followed one another for the tokens after the first, which comes of the prompt.
        work: depth steps of all positions, also of those that went together.
        drafted, accepted: tokens that were proposed before the full depth had decided, and those of them that stayed.
        finish: "stop": a stop token came, or `finished` said so. "length": `max_tokens` are reached.
            "failed": the logits after these tokens are NaN or infinite.
    """

    tokens: list[int]
    depths: list[int]
    finish: str = "length"
    steps: int = 0
    work: int = 0
    drafted: int = 0
    accepted: int = 0


class RowBatch:
    """Rows on their way.

    Args:
        model, programs: what computes them.
        prompts: token ids of each row.
        numbers: of the rows, which the draws depend on.
        size: B of the programs; what `prompts` leave of it is rows that are done from the start.
        max_tokens, sampling, stop_ids: as of `Engine.generate`.
        sampler: as of `Engine`, for this model.
    """

    def __init__(
        self,
        model: FoldedModel,
        programs: Programs,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: int,
        max_tokens: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        sampler: Sampler,
    ):
        self.rows = [Generated([], []) for _ in prompts]
        self._model, self._programs, self._prompts, self._stop_ids = model, programs, prompts, stop_ids
        self._sampler = sampler
        missing = (0, size - len(prompts))
        self._lengths = np.pad(np.array([len(prompt) for prompt in prompts], np.int32), missing, constant_values=1)
        self._numbers = np.pad(np.array(numbers, np.int32), missing)
        limits = np.where(np.arange(size) < len(prompts), self._lengths + max_tokens - 1, 0)
        self._limits = limits.astype(np.int32)
        self._capacity = bucket(int(self._lengths.max()) + max_tokens)
        self._kinds = Kinds(Choosing(sampling.draws, sampling.ranks), sampler.program)
        self._sampling = sampling.numbers()
        self._ends = jnp.asarray(list(stop_ids) or [-1], jnp.int32)

    def begin(self) -> None:
        """The prompts and the first token after each; or where they don't go ahead of the tokens, neither."""
        if not self._sampler.prefills:
            return self._begin_at_once()
        hidden, self._slots = self._prefill()
        self._carried = self._programs.carry(self._model, self._sampler.program, len(self._lengths))
        self._progress, _ = self._programs.first(
            Kinds(self._kinds.choosing), self._model, hidden, self._lengths, self._numbers, self._limits, self._asked(1)
        )
        new = fetch(self._progress.last)[0][:, None]
        self._extend(new, np.full_like(new, self._model.total_depth))

    def _begin_at_once(self) -> None:
        tokens = padded(self._prompts, len(self._lengths), bucket(int(self._lengths.max())))
        self._slots = self._programs.empty_slots(self._model, len(self._lengths), self._capacity)
        carried = self._programs.carry(self._model, self._sampler.program, len(self._lengths))
        self._carried = self._sampler.with_prompts(carried, jnp.asarray(tokens))
        newest = self._lengths - 1
        last = tokens[np.arange(len(newest)), newest]
        depths = np.full_like(newest, self._model.total_depth)
        where = last, newest, newest >= self._limits, self._numbers, self._limits, depths
        self._progress = Progress(*(jnp.asarray(each) for each in where))

    def advance(self, block: int) -> None:
        """About `block` (at most `DECODE_BLOCK`) more tokens for every row that isn't done."""
        brought = self._programs.decode(
            self._kinds, self._model, self._progress, self._slots, self._carried, self._asked(block)
        )
        self._progress, self._slots, self._carried = brought.progress, brought.slots, brought.carried
        new, taken, *tally = fetch(brought.tokens, brought.depths, *brought.tally)
        self._extend(new, taken)
        for name, counts in zip(Tally._fields, tally, strict=True):
            for row, count in zip(self.rows, counts.tolist(), strict=False):  # behind the rows is padding
                setattr(row, name, getattr(row, name) + count)

    def decode_with(self, model: FoldedModel) -> None:
        """Another model of the same weights decodes from here on, such as one that writes down what it does."""
        self._model = model

    def end(self, finished: Finished, first: int) -> None:
        """Ask about every row that goes on; `first` is the number of this batch's first row there."""
        done = np.array(self._progress.done)
        for i, row in enumerate(self.rows):
            if not done[i] and finished(first + i, row.tokens):
                row.finish, done[i] = "stop", True
        self._progress = self._progress._replace(done=jnp.asarray(done))

    @property
    def done(self) -> bool:
        """Whether no row goes on."""
        return bool(np.asarray(self._progress.done).all())

    def _asked(self, block: int) -> Asked:
        return Asked(jnp.int32(block), self._ends, self._sampling, self._sampler.numbers())

    def _prefill(self) -> Any:
        size, longest = len(self._lengths), int(self._lengths.max())
        width = chunk(size, longest, self._model.family.flags.depths_apart)
        tokens = padded(self._prompts, size, -(-longest // width) * width)
        slots = self._programs.empty_slots(self._model, size, self._capacity)
        hidden = jnp.zeros((size, self._model.family.readout_size), self._model.config.dtype)
        for start in range(0, longest, width):
            starts = np.full(size, start, np.int32)
            hidden, slots = self._programs.prefill(
                Kinds(), self._model, tokens[:, start : start + width], starts, self._lengths, slots, hidden
            )
        return hidden, slots

    def _extend(self, new: np.ndarray, taken: np.ndarray) -> None:
        """Append what a block brought to rows that haven't stopped."""
        for i, row in enumerate(self.rows):
            if row.finish != "length":
                continue
            for token, depth in zip(new[i].tolist(), taken[i].tolist(), strict=True):
                if token == BROKEN:
                    row.finish = "failed"
                if token < 0:
                    break
                if token in self._stop_ids:
                    row.finish = "stop"
                    break
                row.tokens.append(token)
                row.depths.append(depth)


def fetch(*arrays: jax.Array) -> list[np.ndarray]:
    """Arrays on the host. An interrupt first lets the running program end: XLA crashes if the process is faster."""
    try:
        return [np.asarray(array) for array in arrays]
    except KeyboardInterrupt:
        jax.block_until_ready(arrays)
        raise


def bucket(count: int, smallest: int = SHORTEST) -> int:
    """The smallest power of two, or one and a half, that is at least `count`."""
    size = smallest
    while size < count:
        size = size * 3 // 2 if size * 3 // 2 >= count and size > 1 else size * 2
    return size


def chunk(rows: int, longest: int, apart: bool = True) -> int:
    """Prompt positions to compute at once: a bucket, or the power of two that `CHUNK_TOKENS` allows. Where depths share
    keys, `apart` False, what a chunk sees depends on where it begins; so there it doesn't depend on the rows."""
    return min(bucket(longest), 1 << max(SHORTEST, CHUNK_TOKENS // (rows if apart else 1)).bit_length() - 1)


def padded(rows: Sequence[Sequence[int]], size: int, length: int) -> np.ndarray:
    """Rows of tokens as one array [size, length] int32, zeros where there are none."""
    tokens = np.zeros((size, length), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens
