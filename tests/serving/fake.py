"""An engine that writes what a function of the request says, at a pace, as `contract.ServingEngine` demands it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers import Adaptive, Lossless, Static
from dreamer_jax.serving.contract import (
    Closed,
    Deliver,
    Finish,
    QueueFull,
    Request,
    RowView,
    Token,
    TooLong,
    Update,
    View,
)

TOKENIZER = ByteTokenizer()
LIKELIEST = ((65, -0.25), (0xC3, -2.0), (TOKENIZER.eos, -3.5))
"""What stands beside every token, whatever it is: a letter, half a character, a special token."""


def repeats_its_prompt(request: Request) -> list[int]:
    """The prompt without begin-of-text, again and again, behind a letter for the number of the answer."""
    text = [token for token in request.prompt if token < 256] or [46]
    return [97 + request.number % 26, *(text * (1 + request.max_tokens // len(text)))]


@dataclass
class Row:
    """A request and what has been written for it."""

    number: int
    request: Request
    deliver: Deliver
    tokens: list[int]
    done: int = 0
    depths: list[int] = field(default_factory=list)
    flight: int = 0


class FakeEngine:
    """Every row gets `block` tokens a step; a token's depth follows from its place.

    Args:
        says: the tokens of an answer; it ends at a stop id or at `max_tokens`.
        rows, queue, context, depth: sizes.
        pace: seconds of a step.
        block: tokens of a row in a step.
        fails_at: tokens after which an answer fails; None for never.
        dies_at: tokens, of all answers, after which the engine fails; None for never.
    """

    def __init__(
        self,
        says: Callable[[Request], list[int]] = repeats_its_prompt,
        rows: int = 8,
        queue: int = 64,
        context: int = 512,
        depth: int = 12,
        pace: float = 0.0005,
        block: int = 1,
        fails_at: int | None = None,
        dies_at: int | None = None,
    ):
        self.says, self.pace, self.block, self.fails_at = says, pace, block, fails_at
        self.context, self.depth, self.most_waiting, self.dies_at = context, depth, queue, dies_at
        self.samplers = {its.name: its for its in (Static(), Adaptive(), Lossless())}
        self.ready, self.failed, self.submitted, self.cancelled = True, False, list[Request](), list[int]()
        self.ended_as: dict[int, Finish] = {}
        self._rows: list[Row | None] = [None] * rows
        self._queue: list[Row] = []
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._lock, self._change, self._closing = threading.Lock(), threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def submit(self, request: Request, deliver: Deliver) -> int:
        return self.submit_all([(request, deliver)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Deliver]]) -> list[int]:
        with self._lock:
            if self._closing or not self.ready:
                raise Closed("the engine has failed" if self.failed else "the engine isn't ready yet")
            for request, _ in requests:
                if request.depth is not None and request.depth > 64:
                    raise UserError(f"depth {request.depth}: the model was trained for 64 at most")
                if len(request.prompt) + request.max_tokens > self.context:
                    tokens = f"{len(request.prompt)} tokens of prompt and {request.max_tokens} to be written"
                    raise TooLong(f"{tokens} don't fit the context of {self.context} tokens")
            if len(self._queue) >= self.most_waiting:
                raise QueueFull
            first = len(self.submitted)
            for number, (request, deliver) in enumerate(requests, start=first):
                self.submitted.append(request)
                self._counts["prompt"] += len(request.prompt)
                self._queue.append(Row(number, request, deliver, self.says(request)))
        return list(range(first, first + len(requests)))

    def cancel(self, number: int, finish: Finish = "cancelled") -> None:
        with self._lock:
            self.cancelled.append(number)
            self.ended_as[number] = finish

    def view(self) -> View:
        with self._lock:
            rows = tuple(
                row
                and RowView(
                    row.number,
                    row.request.sampler.name,
                    len(row.request.prompt) + row.done,
                    tuple(range(self.depth, 0, -3)) if row.request.sampler.name == "lossless" else (row.flight,),
                    row.done,
                    sum(row.depths) / max(1, len(row.depths)),
                )
                for row in self._rows
            )
            counts, finished = self._counts, dict(self._finished)
            busy = sum(row is not None for row in self._rows)
            reached = None if not counts["row_steps"] else counts["busy_row_steps"] / counts["row_steps"]
            return View(rows, len(self._queue), self.depth, 64, 64 - 4 * busy, counts["prompt"], 0, counts["tokens"],
                        counts["depths"], counts["steps"], counts["row_steps"], counts["busy_row_steps"], finished,
                        reached)  # fmt: skip

    def close(self, grace: float) -> None:
        with self._lock:
            self._closing = True
        until = time.monotonic() + grace
        while time.monotonic() < until and (self._queue or any(self._rows)):
            time.sleep(0.005)
        with self._lock:
            self._end_all("cancelled")
        self._thread.join()

    _stopped = False

    def _run(self) -> None:
        while not self._stopped:
            with self._lock:
                self._step()
                idle = not any(self._rows)
            time.sleep(0.002 if idle else self.pace)

    def _step(self) -> None:
        if self.dies_at is not None and self._counts["tokens"] >= self.dies_at:
            self.ready, self.failed = False, True
            self._end_all("failed")
        for row in [row for row in self._queue if row.number in self.cancelled]:
            self._queue.remove(row)
            self._end(row, self.ended_as[row.number])
        for place, row in enumerate(self._rows):
            if row is not None and row.number in self.cancelled:
                self._end(row, self.ended_as[row.number])
                self._rows[place] = row = None
            if row is None and self._queue:
                self._rows[place] = self._queue.pop(0)
        active = [row for row in self._rows if row is not None]
        if active:
            self._counts["steps"] += self.depth
            self._counts["row_steps"] += self.depth * len(self._rows)
        for place, row in enumerate(self._rows):
            if row is not None and self._write(row):
                self._rows[place] = None

    def _write(self, row: Row) -> bool:
        """The next tokens of a row; whether it has ended."""
        if self.fails_at is not None and row.done >= self.fails_at:
            self._end(row, "failed")
            return True
        request, tokens, finish = row.request, [], None
        if not request.max_tokens:
            finish = "length"
        for token in row.tokens[row.done : row.done + self.block] if request.max_tokens else []:
            if token in request.stop_ids:
                finish = "stop"
                if not request.scored:
                    break
            recorded = getattr(request.sampler, "depths", None)
            depth = recorded[row.done % len(recorded)] if recorded else 1 + (token + row.done) % self.depth
            row.done += 1
            row.depths.append(depth)
            row.flight = depth
            likeliest = LIKELIEST[: request.logprobs] if request.logprobs else ()
            tokens.append(Token(token, depth, None if request.logprobs is None else -0.5, likeliest))
            if finish is None and row.done == request.max_tokens:
                finish = "length"
            if finish is not None:
                break
        self._counts["tokens"] += len(tokens)
        self._counts["depths"] += sum(token.depth for token in tokens)
        self._counts["busy_row_steps"] += sum(token.depth for token in tokens)
        if finish is None and row.done >= len(row.tokens):
            finish = "stop"
        if finish is not None:
            self._finished[finish] += 1
        prompt = [Token(each, 4, None if request.logprobs is None else -0.75, LIKELIEST[: request.logprobs or 0])
                  for each in request.prompt] if request.echo and row.done == len(tokens) else []  # fmt: skip
        row.deliver(Update(tuple(tokens), finish, (Token(request.prompt[0], 0), *prompt[1:]) if prompt else ()))
        return finish is not None

    def _end(self, row: Row, finish: Finish) -> None:
        self._finished[finish] += 1
        row.deliver(Update((), finish))

    def _end_all(self, finish: Finish) -> None:
        for row in [*self._queue, *self._rows]:
            if row is not None:
                self._end(row, finish)
        self._queue.clear()
        self._rows[:] = [None] * len(self._rows)
        self._stopped = True
