"""The answers to one HTTP request on their way from the engine's thread to the connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.inference.growing import Growing
from dreamer_jax.serving.contract import Closed, QueueFull, Request, ServingEngine, Token, TooLong, Update
from dreamer_jax.serving.metrics import Metrics
from dreamer_jax.serving.protocol import Refused
from dreamer_jax.serving.shapes import Part, Shapes, usage

MOST_WAITING = 4096
"""Tokens of a request that come while its client doesn't read; beyond, it loses its connection."""
PATIENCE = 30.0
"""Seconds that a client may take to make room for more of its answer."""
DONE = b"data: [DONE]\n\n"

Send = Callable[[bytes], Awaitable[None]]


class Broken(Exception):
    """The answer can't be finished: the engine failed, or it is stopping."""


class Slow(Exception):
    """The client doesn't read."""


class Choice:
    """One answer.

    Attributes:
        tokens: those of its text and its stop string; not those of a prompt that comes with it.
        finish: "stop" or "length"; None while it grows.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str]):
        self.tokens: list[Token] = []
        self.finish: str | None = None
        self._index, self._growing = index, Growing(tokenizer, stop)
        self._tokenizer, self._echo = tokenizer, tuple[Token, ...]()  # of the prompt, until it goes out
        self._sent, self._offset, self._finished = 0, 0, False

    def take(self, update: Update) -> bool:
        """Take in what the engine has delivered; whether a stop string has ended it before the engine has."""
        self._echo += update.prompt
        self._growing.add(token.id for token in update.tokens)
        self.tokens += update.tokens[: self._growing.tokens - len(self.tokens)]
        if self._growing.stopped:
            self.finish = "stop"
            return update.finish is None
        if update.finish in ("stop", "length"):
            self._growing.end()
            self.finish = "stop" if self._growing.stopped else update.finish
        return False

    def next_part(self) -> Part | None:
        """What is certain and hasn't gone out yet; None if nothing is."""
        texts = tuple(self._growing.pieces(self._sent))
        if self._finished or not (texts or self.finish or self._echo):
            return None
        tokens = tuple(self.tokens[self._sent : self._sent + len(texts)])
        self._sent += len(texts)
        if self._echo:
            prompt = Growing(self._tokenizer)
            prompt.add(token.id for token in self._echo)
            prompt.end()
            tokens, texts, self._echo = self._echo + tokens, (*prompt.pieces(), *texts), ()
        part = Part(self._index, tokens, texts, self._offset, self.finish)
        self._offset, self._finished = self._offset + len(part.text), part.ends
        return part

    @property
    def text(self) -> str:
        """As far as it is certain."""
        return self._growing.text


class Answering:
    """All answers to one request of HTTP; lives in the event loop's thread.

    Args:
        engine: that writes them.
        shapes: how they look to the client.
        stop: strings that end them.
        streamed: whether parts go out while they grow.
        metrics: gets the time to the first token.
    """

    def __init__(self, engine: ServingEngine, shapes: Shapes, stop: Sequence[str], streamed: bool, metrics: Metrics):
        self._engine, self._shapes, self._stop, self._metrics = engine, shapes, stop, metrics
        self._streamed = streamed
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._numbers: list[int] = []
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self._changed, self.slow = asyncio.Event(), asyncio.Event()
        self._broken = ""
        self._waiting = 0  # tokens that came since the stream last looked; while it waits for them, it looks at each

    def submit(self, requests: Sequence[Request], prompts: int) -> None:
        """Hand in all requests, or none.

        Args:
            requests: one for each answer.
            prompts: how many there are; the answers to each stand together.
        Raises:
            Refused: the engine doesn't take them.
        """
        each = len(requests) // prompts
        self.prompt_tokens = sum(len(request.prompt) for request in requests[::each])
        self.choices = [Choice(index, self._shapes.tokenizer, self._stop) for index in range(len(requests))]
        taking = [(request, functools.partial(self._deliver, index)) for index, request in enumerate(requests)]
        try:
            self._numbers = self._engine.submit_all(taking)
        except (QueueFull, TooLong, Closed, UserError) as error:
            raise _refusal(error) from None

    def cancel(self) -> None:
        """Give up what isn't finished."""
        for number, choice in zip(self._numbers, self.choices, strict=True):
            if choice.finish is None:
                self._engine.cancel(number)

    async def whole(self) -> dict[str, Any]:
        """The answer at once.

        Raises:
            Broken: it can't be finished.
        """
        while not self._ended():
            await self._changed.wait()
            self._changed.clear()
            if self._broken:
                raise Broken(self._broken)
        parts = [choice.next_part() for choice in self.choices]
        return self._shapes.whole([part for part in parts if part is not None], self.usage())

    async def stream(self, send: Send) -> None:
        """Send the answer while it grows.

        Raises:
            Broken: it can't be finished.
            Slow: the client doesn't read.
        """
        openings = [self._shapes.opening(index) for index in range(len(self.choices))]
        await _sent(send, b"".join(event(opening) for opening in openings if opening is not None))
        while True:
            ended, broken = self._ended(), self._broken
            parts = [choice.next_part() for choice in self.choices]
            self._waiting = 0
            text = b"".join(event(self._shapes.chunk(part)) for part in parts if part is not None)
            if text:
                await _sent(send, text)
            if broken:
                raise Broken(broken)
            if ended:
                break
            await self._changed.wait()
            self._changed.clear()
        last = event(self._shapes.usage_chunk(self.usage())) if self._shapes.include_usage else b""
        await _sent(send, last + DONE)

    def usage(self) -> dict[str, Any]:
        """What was counted so far."""
        return usage(self.prompt_tokens, [choice.tokens for choice in self.choices])

    def _ended(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def _deliver(self, index: int, update: Update) -> None:
        """Called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._take, index, update)

    def _take(self, index: int, update: Update) -> None:
        choice = self.choices[index]
        if choice.finish is not None:
            return
        if update.tokens and not choice.tokens:
            self._metrics.first_token(time.monotonic() - self._began)
        if choice.take(update):
            self._engine.cancel(self._numbers[index], "stop")
        if choice.finish is None and update.finish is not None:
            self._broken = update.finish
        if self._streamed:
            self._waiting += len(update.tokens)
            if self._waiting > MOST_WAITING:
                self.slow.set()
        self._changed.set()


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event, on one line also for those who end lines where Unicode does."""
    return (
        b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).translate(_ENDS).encode() + b"\n\n"
    )


_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}


async def _sent(send: Send, text: bytes) -> None:
    """Send, or find that there is no room for too long."""
    try:
        async with asyncio.timeout(PATIENCE):
            await send(text)
    except TimeoutError:
        raise Slow from None


def _refusal(error: Exception) -> Refused:
    """What the client is told of an error of `ServingEngine.submit_all`."""
    if isinstance(error, QueueFull):
        return Refused(429, "too many requests wait; try again in a moment", code="queue_full")
    if isinstance(error, Closed):
        return Refused(503, f"the server takes no requests now: {error}", code="not_ready")
    if isinstance(error, TooLong):
        problem = f"{error}; shorten the prompt or ask for fewer (max_tokens)"
        return Refused(413, problem, code="context_length_exceeded")
    field = str(error).partition(" ")[0]  # the engine's refusals begin with it
    return Refused(400, str(error), field if field in ("depth", "sampler") else None)
