"""How large a served engine is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dreamer_jax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Sizes of a served engine. They decide its compiled programs; 0 stands for a number that is chosen."""

    rows: int = 16
    """Requests that each sampler's program computes at once."""
    context: int = 1024
    """Most tokens of a prompt and its answer together."""
    page: int = 16
    """Positions of a page of keys and values."""
    pages: int = 0
    """Pages for all requests together. 0: so many that as many requests as one program has rows fill their context."""
    chunk: int = 64
    """Prompt tokens that are computed at once, whole pages; equal prompts share what they have at its multiples."""
    steps: int = 0
    """Depth steps between two looks at what has come and gone. 0: as many as a token takes."""
    collect: int = 1
    """Tokens that wait for each other before the head is read for all of them; more is for large vocabularies."""
    queue: int = 256
    """Most requests that wait."""
    logprobs: int = 20
    """Likeliest tokens whose logarithms a request may ask for at most."""
    stop_ids: int = 8
    """Tokens of a request that may end it on the device; further ones end it a moment later."""

    def __post_init__(self) -> None:
        smallest = {"pages": 0, "steps": 0, "logprobs": 0, "queue": 0}
        for field in dataclasses.fields(self):
            least = smallest.get(field.name, 1)
            if getattr(self, field.name) < least:
                raise UserError(f"{field.name} {getattr(self, field.name)}: must be {least} or more")
        if self.chunk % self.page:
            raise UserError(f"chunk {self.chunk}: must be whole pages of {self.page} positions")

    @property
    def pages_per_row(self) -> int:
        """M: pages of the longest request."""
        return -(-self.context // self.page)

    @property
    def all_pages(self) -> int:
        """In the pool."""
        return self.pages or self.rows * self.pages_per_row
