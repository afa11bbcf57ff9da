"""Choosing the next token: greedy, or drawn at a temperature from what top-k, top-p and min-p leave."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.errors import UserError, number, whole

COLDEST = 1e-30
"""Temperatures below are as this one, so that no logit is divided to infinity, where all would be alike."""
LARGEST = 1e30
"""Above all tokens are equally likely long since, and float32 ends."""
BROKEN = -2
"""In the place of a token where there is none to choose, as logits are NaN or infinite. It ends its row; -1 is behind a
row's last token."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The filters apply in this order, each to what the one before has left.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token and ignores the rest.
        top_k: only the k likeliest tokens (0: all). Equally likely ones at the border stay in together.
        top_p: only the likeliest tokens that together reach this probability (1: all).
        min_p: only tokens at least this fraction as likely as the likeliest (0: all).
        seed: with the number of the row and the position of the token it decides the draw, whatever else is computed
            in the same batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("top_k", "seed"):
            object.__setattr__(self, key, whole(getattr(self, key), f"sampling: {key}"))
        for key in ("temperature", "top_p", "min_p"):
            number(getattr(self, key), f"sampling: {key}")
        problems = {
            f"temperature {self.temperature}: must be from 0 to {LARGEST:g}": not 0 <= self.temperature <= LARGEST,
            f"top_k {self.top_k}: must be from 0 (all tokens) to 2^31 - 1": not 0 <= self.top_k < 2**31,
            f"top_p {self.top_p}: must be more than 0 and at most 1": not 0 < self.top_p <= 1,
            f"min_p {self.min_p}: must be from 0 to 1": not 0 <= self.min_p <= 1,
            f"seed {self.seed}: must be from 0 to 2^32 - 1": not 0 <= self.seed < 2**32,
        }
        for problem, wrong in problems.items():
            if wrong:
                raise UserError(f"sampling: {problem}")

    @property
    def draws(self) -> bool:
        """Whether anything is left to chance."""
        return self.temperature > 0

    @property
    def label(self) -> str:
        """The settings that aren't defaults, as a part of file names: "temperature-0.2-top_p-0.95"; "" where nothing
        is drawn."""
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{name}-{getattr(self, name)}" for name in changed) if self.draws else ""

    @property
    def ranks(self) -> bool:
        """Whether the logits have to be sorted."""
        return self.draws and (self.top_k > 0 or self.top_p < 1)

    def numbers(self) -> SamplingNumbers:
        """The settings as run-time numbers, so that changing them compiles nothing anew."""
        return SamplingNumbers(
            np.float32(self.temperature),
            np.float32(self.top_k),
            np.float32(self.top_p),
            np.float32(self.min_p),
            np.uint32(self.seed),
        )


class SamplingNumbers(NamedTuple):
    """`Sampling` as scalars, float32, the seed uint32; or as [B], one for each row."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any


def choose(
    logits: jax.Array, numbers: SamplingNumbers, rows: jax.Array, positions: jax.Array, draws: bool, ranks: bool
) -> jax.Array:
    """The next token of every row.

    Args:
        logits: [B, V] float32.
        numbers: see `Sampling`.
        rows: [B] int32, the number of each row among all that are generated.
        positions: [B] int32, of the token that is chosen.
        draws, ranks: of `Sampling`, or whether any row has them; static.

    Returns:
        [B] int32; `BROKEN` where a logit is NaN or infinitely large, or none is finite.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not draws:
        return unless_broken(likeliest, logits)
    kept = keep(tempered(logits, numbers), numbers, ranks)
    drawn = jax.vmap(jax.random.categorical)(draw_keys(numbers, rows, positions), kept)
    token = jnp.where(numbers.temperature > 0, drawn, likeliest).astype(jnp.int32)
    return unless_broken(token, logits)


def unless_broken(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Tokens [...] that were chosen from logits [..., V]; `BROKEN` where one of those is NaN or infinitely large, or
    none is finite: for argmax NaN is the largest, so that one number tells of all."""
    likeliest = jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(jnp.take_along_axis(logits, likeliest, axis=-1)[..., 0]), tokens, BROKEN)


def draw_keys(numbers: SamplingNumbers, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """The keys that tokens at these positions of these rows are drawn with, all of one shape."""

    def key(seed: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)

    seeds = jnp.broadcast_to(by_row(numbers.seed, rows), rows.shape)
    return jax.vmap(key)(seeds.reshape(-1), rows.reshape(-1), positions.reshape(-1)).reshape(rows.shape)


def by_row(number: jax.Array, like: jax.Array) -> jax.Array:
    """A number [], or one of each row [B], that broadcasts against [B, ...]."""
    return number.reshape(-1, *[1] * (like.ndim - 1)) if number.ndim else number


def tempered(logits: jax.Array, numbers: SamplingNumbers) -> jax.Array:
    """Logits [B, ..., V] divided by the temperature; those of greedy rows as they are."""
    temperature = jnp.maximum(numbers.temperature, COLDEST)
    return logits / by_row(jnp.where(numbers.temperature > 0, temperature, 1), logits)


def probabilities(logits: jax.Array, numbers: SamplingNumbers, ranks: bool) -> jax.Array:
    """What tokens are drawn with, [..., V] like the logits; `ranks` of `Sampling`."""
    return jax.nn.softmax(keep(tempered(logits, numbers), numbers, ranks), axis=-1)


def keep(logits: jax.Array, numbers: SamplingNumbers, ranks: bool) -> jax.Array:
    """Logits [B, ..., V], after the temperature, with -inf for every token that top-k, top-p or min-p leaves out."""
    if ranks:
        ordered = -jnp.sort(-logits, axis=-1)
        rank, top_k = jnp.arange(logits.shape[-1]), by_row(numbers.top_k, logits)
        ordered = jnp.where((rank < top_k) | (top_k == 0), ordered, -jnp.inf)
        likelihood = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(likelihood, axis=-1) - likelihood
        top_p = by_row(numbers.top_p, logits)
        # The likeliest always stays, also where top_p is rounded to 0; 1 is all, also where the sum is rounded to 1.
        inside = ((before < top_p) | (rank == 0) | (top_p >= 1)) & (ordered > -jnp.inf)
        border = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= border, logits, -jnp.inf)
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(by_row(numbers.min_p, logits))  # log(0) leaves all
    return jnp.where(logits >= least, logits, -jnp.inf)
