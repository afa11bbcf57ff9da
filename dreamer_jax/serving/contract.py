"""What a served engine takes and gives: requests, pieces of their answers, and a picture of what it does.

One thread owns the engine. Others hand in requests and cancel them; what comes of a request is delivered from the
engine's thread, so whoever takes it must not wait there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from dreamer_jax.inference.samplers import Sampler, Static
from dreamer_jax.inference.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """One text to be continued.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: most tokens that it gets; with `echo` it may be 0.
        sampling: how they are chosen; with `number` its seed decides every draw, whatever else is computed beside it.
        sampler: how they go through the depths.
        depth: L of its passes; None for the engine's.
        number: of this text among those of the same prompt and seed.
        logprobs: of how many likeliest tokens logarithms are wanted beside the chosen one's; None for none at all.
        stop_ids: tokens that end it.
        echo: whether the prompt comes with the answer. With `logprobs` that has the logarithms of its tokens, too, and
            of the stop token that ends it; then all of it is computed, whatever keys are there already.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    sampler: Sampler = field(default_factory=Static)
    depth: int | None = None
    number: int = 0
    logprobs: int | None = None
    stop_ids: tuple[int, ...] = ()
    echo: bool = False

    @property
    def scored(self) -> bool:
        """Whether logarithms of the prompt's tokens are wanted."""
        return self.echo and self.logprobs is not None


class Token(NamedTuple):
    """One token of an answer, or of a prompt that comes with it.

    Attributes:
        id: of the token.
        depth: how many depths its predecessor went through; 0 of a prompt's first token, which has none.
        logprob: natural logarithm of its probability before temperature and filters; None if it wasn't asked for, and
            of a prompt's first token.
        likeliest: the likeliest tokens with theirs, in order.
    """

    id: int
    depth: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


Finish = Literal["stop", "length", "cancelled", "failed"]
"""How an answer ends: a stop token (delivered only if `Request.scored`), `max_tokens`, somebody's wish, a fault of the
engine."""


class Update(NamedTuple):
    """More of an answer: its next tokens, and how it ends if it does. Nothing is delivered after that. The first one
    has the prompt, if that was asked for."""

    tokens: tuple[Token, ...]
    finish: Finish | None = None
    prompt: tuple[Token, ...] = ()


Deliver = Callable[[Update], None]
"""Takes an update, in the engine's thread."""


class QueueFull(Exception):
    """As many requests wait as the engine lets wait."""


class TooLong(Exception):
    """The prompt and its answer don't fit the engine's context; the message says how long they are and what fits."""


class Closed(Exception):
    """The engine takes no requests: it isn't ready yet, it is stopping, or it has failed; the message says which."""


class RowView(NamedTuple):
    """A request that is being computed.

    Attributes:
        request: its number.
        sampler: its name.
        position: of its newest token that is certain.
        depths: of its positions in flight, the oldest first, how many depths each has gone through.
        tokens: delivered so far.
        mean_depth: of them.
    """

    request: int
    sampler: str
    position: int
    depths: tuple[int, ...]
    tokens: int
    mean_depth: float


class View(NamedTuple):
    """The engine at a moment. Counts are since its start.

    Attributes:
        rows: what its slots hold; None for a free one.
        queue: requests that wait.
        depth: L.
        pages, free_pages: of keys and values. Free ones may hold prefixes that are kept for equal prompts.
        prompt_tokens, shared_tokens: of prompts; those of them whose keys were there already.
        tokens, depths: generated; and the depths that they went through, added up.
        steps, row_steps, busy_row_steps: depth steps; places for positions in them; places that took one further.
        finished: answers by how the engine ended them.
        share_of_bound: of the speed-up that exit depths allow, what the engine has reached (docs/serving.md); None
            before there is something to divide by.
        decoded, decoded_depths: those of the tokens that didn't come of a prompt, and their depths, added up.
        border_rows: places for which prelude, coda and head were computed.
        prompt_seconds, decode_seconds: that the device took for prompts, and for everything behind them.
    """

    rows: tuple[RowView | None, ...]
    queue: int
    depth: int
    pages: int
    free_pages: int
    prompt_tokens: int
    shared_tokens: int
    tokens: int
    depths: int
    steps: int
    row_steps: int
    busy_row_steps: int
    finished: dict[str, int]
    share_of_bound: float | None
    decoded: int = 0
    decoded_depths: int = 0
    border_rows: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


class ServingEngine(Protocol):
    """What a server needs of an engine. Every method may be called from any thread."""

    @property
    def ready(self) -> bool:
        """Whether its programs are compiled and it takes requests."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a fault has ended it; it is never ready again then."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more; after `close` that is so, unless a program was being compiled."""
        ...

    @property
    def samplers(self) -> Mapping[str, Sampler]:
        """Those that it serves, by name; of several with one name the one that the name alone stands for."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Take a request; its number. See `submit_all`."""
        ...

    def submit_all(self, requests: Sequence[tuple[Request, Deliver]]) -> list[int]:
        """Take requests that belong together, all of them or none; their numbers. Where one more may wait, all may: so
        however many there are, they are taken sooner or later.

        Raises:
            QueueFull, TooLong, Closed: see there.
            UserError: one can't be served, such as by a sampler that the model refuses.
        """
        ...

    def cancel(self, number: int, finish: Finish = "cancelled") -> None:
        """End a request at the next step, if it is still there; it is delivered, and counted, as `finish`."""
        ...

    def view(self) -> View:
        """What it does now."""
        ...

    def close(self, grace: float) -> None:
        """Take no further requests, finish those that are here within so many seconds, cancel the rest, and end; a
        program that is being compiled is waited for as long."""
        ...
