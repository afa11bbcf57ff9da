"""What belongs to a request beside its place: what it was given so far, and what of a turn is its."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dreamer_jax.inference.sampling import BROKEN, SamplingNumbers
from dreamer_jax.serving.contract import Deliver, Finish, Request, RowView, Token, Update
from dreamer_jax.serving.programs import Brought
from dreamer_jax.serving.scheduler import Job

logger = logging.getLogger(__name__)


class Answer:
    """A request and whoever takes its answer.

    Args:
        request: as it was given.
        deliver: takes updates.
        sampling, settings: of its sampling and of its sampler, as its program's numbers.
    """

    def __init__(self, request: Request, deliver: Deliver, sampling: SamplingNumbers, settings: Any):
        self.request, self.sampling, self.settings = request, sampling, settings
        self.in_flight: tuple[int, ...] = ()
        self._deliver, self._depths = deliver, 0
        self._prompt: list[Token] = []  # that wasn't delivered yet

    def deliver(self, update: Update) -> bool:
        """Hand an update over, with the prompt if that is still to come; whether it was taken."""
        prompt, self._prompt = tuple(self._prompt), []
        try:
            self._deliver(update._replace(prompt=prompt))
        except Exception:
            logger.exception("an answer couldn't be delivered")
            return False
        return True

    def next_tokens(
        self, job: Job, tokens: np.ndarray, depths: np.ndarray, logprobs: Any
    ) -> tuple[list[Token], Finish | None]:
        """What of tokens [N], up to the first -1, is new to the request, and how they end it, if they do. A request
        that has begun anew gets the same tokens again; it isn't given those that it has."""
        new: list[Token] = []
        for n, (token, depth) in enumerate(zip(tokens.tolist(), depths.tolist(), strict=True)):
            if token == BROKEN:
                return new, "failed"
            if token < 0:
                break
            if not job.most:
                return new, "length"
            ends = token in self.request.stop_ids
            if ends and not self.request.scored:
                return new, "stop"
            job.tokens += 1
            if job.tokens > job.delivered:
                new.append(Token(token, depth, *self._logprobs(logprobs, n)))
                self._depths += depth
            if ends:
                return new, "stop"
            if job.tokens == job.most:
                return new, "length"
        return new, None

    def echo(self, depth: int) -> None:
        """Have the prompt ready, at L depths, if it is wanted."""
        if self.request.echo:
            first, *others = self.request.prompt
            self._prompt = [Token(first, 0), *(Token(each, depth) for each in others)]

    def following(self, start: int, count: int) -> tuple[int, ...]:
        """The prompt's tokens after `count` positions from `start` on, as far as there are some."""
        return self.request.prompt[start + 1 : start + 1 + count]

    def scored(self, start: int, logprobs: Any) -> None:
        """Take the logarithms of the prompt's tokens after positions from `start` on."""
        after = self._prompt[start + 1 : start + 1 + len(logprobs.chosen)]
        for n, token in enumerate(after):
            self._prompt[start + 1 + n] = Token(token.id, token.depth, *self._logprobs(logprobs, n))

    def _logprobs(self, logprobs: Any, n: int) -> tuple[Any, ...]:
        count = self.request.logprobs
        if count is None:
            return ()
        pairs = zip(logprobs.ids[n, :count].tolist(), logprobs.values[n, :count].tolist(), strict=True)
        return float(logprobs.chosen[n]), tuple(pairs)

    def view(self, job: Job) -> RowView:
        """Where it is."""
        mean = self._depths / job.delivered if job.delivered else 0.0
        position = len(job.prompt) + job.tokens - 1 if job.joined else job.computed - 1
        return RowView(job.number, self.request.sampler.name, position, self.in_flight, job.delivered, mean)


@dataclass
class Turn:
    """What the device was handed in a turn, and whose it is.

    Attributes:
        chunk: something of the last chunk of a prompt to wait for; () without one.
        scored: of each chunk of prompts whose logarithms are wanted: of each device the request and where the chunk
            starts, and the logarithms.
        first: of each group that rows have joined: of each device the request and how often it had begun, and their
            first tokens.
        brought: of the tick.
        group: whose tick it was.
        owners: place -> request, and how often it had begun.
        begun: when, in seconds of `time.perf_counter`.
    """

    chunk: Any = ()
    scored: list[tuple[dict[int, tuple[Job, int]], Any]] = field(default_factory=list)
    first: list[tuple[dict[int, tuple[Job, int]], Any]] = field(default_factory=list)
    brought: Brought | None = None
    group: int = 0
    owners: dict[int, tuple[Job, int]] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    @staticmethod
    def still(job: Job, begun: int) -> bool:
        """Whether a request is where it was: it hasn't ended, and it hasn't begun anew."""
        return job.row is not None and job.begun == begun
