"""How large a served engine is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dreamer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Sizes of a served engine. They decide its compiled programs; 0 stands for a number that is chosen."""

    rows: int = 16
    """Requests that a step of each sampler's program takes; on a mesh rounded up to a multiple of its devices, as are
    places and pages."""
    places: int = 0
    """Requests that have begun, in each program whose rows don't wait for each other; a step takes `rows` of them, so
    that none of its rows is empty while others are between two tokens. 0: twice as many."""
    context: int = 1024
    """Most tokens of a prompt and its answer together."""
    page: int = 16
    """Positions of a page of keys and values."""
    pages: int = 0
    """Pages for all requests together. 0: so many that as many requests as one program has places fill their
    context."""
    chunk: int = 64
    """Prompt tokens that are computed at once, whole pages; equal prompts share what they have at its multiples."""
    steps: int = 0
    """Depth steps between two looks at what has come and gone. 0: as many as a token takes."""
    collect: float = 0.5
    """Share of a program's requests that has to be between two tokens before prelude, coda and head are computed, for
    as many of them as a step takes. 0: none waits; 1: all wait for the slowest."""
    queue: int = 256
    """Requests that wait before no more are taken; those that belong together are taken as one."""
    logprobs: int = 20
    """Likeliest tokens whose logarithms a request may ask for at most."""
    stop_ids: int = 8
    """Tokens of a request that may end it on the device; further ones end it a moment later."""

    def __post_init__(self) -> None:
        smallest = {"pages": 0, "places": 0, "steps": 0, "logprobs": 0, "queue": 0, "collect": 0}
        for field in dataclasses.fields(self):
            least = smallest.get(field.name, 1)
            if getattr(self, field.name) < least:
                raise UserError(f"{field.name} {getattr(self, field.name)}: must be {least} or more")
        if self.places and self.places < self.rows:
            raise UserError(f"places {self.places}: must be at least as many as rows, {self.rows}")
        if self.collect > 1:
            raise UserError(f"collect {self.collect}: a share, so at most 1")
        if self.chunk % self.page:
            raise UserError(f"chunk {self.chunk}: must be whole pages of {self.page} positions")

    @property
    def all_places(self) -> int:
        """Of a program whose rows don't wait for each other."""
        return self.places or 2 * self.rows

    @property
    def pages_per_row(self) -> int:
        """M: pages of the longest request."""
        return -(-self.context // self.page)

    @property
    def all_pages(self) -> int:
        """In the pool."""
        return self.pages or self.all_places * self.pages_per_row
