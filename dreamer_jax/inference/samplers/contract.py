"""What a sampler is: its settings, what it needs of a family, and its program for a block of decoding.

After the prompts every row has one token that isn't in the caches yet (`Progress`). A sampler is asked for a block: it
brings every row that isn't done some tokens further, in one compiled program. How it moves positions through the depths
is its own business; the four calls of `FoldedModel` (enter, step, leave, logits) are all that it has.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.errors import UserError
from dreamer_jax.families import Family
from dreamer_jax.inference.model import FoldedModel, PyTree
from dreamer_jax.inference.sampling import SamplingNumbers, choose

DECODE_BLOCK = 32
"""Tokens that a row is asked for at most in one call."""
NOWHERE = 1 << 30
"""A position outside of all slots."""


class Progress(NamedTuple):
    """Where each row of a batch is.

    Attributes:
        last: [B] int32, the newest token, not yet in the caches.
        positions: [B] int32, its position.
        done: [B] bool, the newest token ends the row.
        rows: [B] int32, the number of the row among all that are generated.
        limits: [B] int32, the position of the last token that may be generated.
    """

    last: jax.Array
    positions: jax.Array
    done: jax.Array
    rows: jax.Array
    limits: jax.Array


class Choosing(NamedTuple):
    """How tokens are chosen, as far as it decides the code of a program: `draws` and `ranks` of `Sampling`."""

    draws: bool = False
    ranks: bool = False


class Asked(NamedTuple):
    """What a block is asked for; run-time numbers.

    Attributes:
        limit: tokens that every row is to get, at most `DECODE_BLOCK`.
        stop_ids: [N] int32, tokens that end a row.
        sampling: see there.
        settings: the sampler's own, see `Sampler.numbers`.
    """

    limit: jax.Array
    stop_ids: jax.Array
    sampling: SamplingNumbers
    settings: PyTree

    def choose(self, choosing: Choosing, logits: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """The token at these positions [B] from logits [B, V]; see `sampling.choose`."""
        return choose(logits, self.sampling, rows, positions, *choosing)


class Tally(NamedTuple):
    """What tokens have cost, [B] int32 each.

    Attributes:
        steps: depth steps that the row went through one after the other.
        work: depth steps of all its positions, also those at which several positions went together.
        drafted: tokens that were proposed before the full depth had decided, and then decided.
        accepted: those of them that were kept.
    """

    steps: jax.Array
    work: jax.Array
    drafted: jax.Array
    accepted: jax.Array

    @classmethod
    def none(cls, rows: int) -> Tally:
        """Of B rows before the block."""
        zeros = jnp.zeros(rows, jnp.int32)
        return cls(zeros, zeros, zeros, zeros)

    def plus(self, rows: jax.Array, *more: Any) -> Tally:
        """With more of the first fields, in their order, for those `rows` [B] bool."""
        new = [count + rows * jnp.asarray(each, jnp.int32) for count, each in zip(self, more, strict=False)]
        return Tally(*new, *self[len(new) :])


class Carried(NamedTuple):
    """What a sampler keeps from one block to the next; empty by default.

    Attributes:
        by_row: arrays whose first axis are the rows.
        by_slot: arrays whose second axis are the rows, or rows and positions together.
    """

    by_row: PyTree = ()
    by_slot: PyTree = ()


class Block(NamedTuple):
    """What a block has brought.

    Attributes:
        tokens, depths: [B, N] int32, the new tokens and how many depths each one's predecessor went through; -1 behind
            a row's last.
        progress, slots, carried: where the rows are now.
        tally: of this block.
    """

    tokens: jax.Array
    depths: jax.Array
    progress: Progress
    slots: PyTree
    carried: Carried
    tally: Tally

    @classmethod
    def empty(cls, progress: Progress, slots: PyTree, carried: Carried, room: int) -> Block:
        """At its begin, with room for so many tokens of a row."""
        rows = progress.last.shape[0]
        nothing = jnp.full((rows, room), -1, jnp.int32)
        return cls(nothing, nothing, progress, slots, carried, Tally.none(rows))

    @property
    def counts(self) -> jax.Array:
        """[B], tokens so far."""
        return jnp.sum(self.tokens >= 0, axis=1, dtype=jnp.int32)

    def wanting(self, limit: jax.Array) -> jax.Array:
        """[B] bool, rows that aren't done and have fewer tokens than asked for."""
        return ~self.progress.done & (self.counts < limit)

    def grown(self, tokens: jax.Array, count: jax.Array, depths: jax.Array, stop_ids: jax.Array) -> Block:
        """With new tokens at the end of each row, as far as the row goes: to a stop token, or to its limit.

        Args:
            tokens: [B, N] int32.
            count: [B], how many of them each row gets; 0 leaves a row as it is.
            depths: [B] or [B, N] int32, which their predecessors went through.
            stop_ids: as of `Asked`.
        """
        progress, number = self.progress, jnp.arange(tokens.shape[1])
        ends = jnp.isin(tokens, stop_ids)
        before = jnp.cumsum(ends, axis=1) - ends  # stop tokens before each
        room = progress.limits - progress.positions
        kept = (number < jnp.minimum(count, room)[:, None]) & (before == 0)
        taken = jnp.sum(kept, axis=1, dtype=jnp.int32)  # they are the first ones
        rows = jnp.arange(tokens.shape[0])[:, None]
        depths = jnp.broadcast_to(depths if depths.ndim == 2 else depths[:, None], tokens.shape)
        place = jnp.where(kept, self.counts[:, None] + number, self.tokens.shape[1])
        new = {
            name: getattr(self, name).at[rows, place].set(its, mode="drop")
            for name, its in (("tokens", tokens), ("depths", depths))
        }
        newest = jnp.take_along_axis(tokens, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
        positions = progress.positions + taken
        done = progress.done | jnp.any(kept & ends, axis=1) | (positions >= progress.limits)
        last = jnp.where(taken > 0, newest, progress.last)
        return self._replace(progress=progress._replace(last=last, positions=positions, done=done), **new)


@dataclass(frozen=True)
class Sampler:
    """How positions go through the depths. A sampler is a frozen dataclass of its settings: the docstring of each is
    its help, and 0 stands for a number that is chosen."""

    name: ClassVar[str]
    early: ClassVar[bool] = False
    """Whether tokens may stop before the last depth."""
    drafts: ClassVar[bool] = False
    """Whether tokens are proposed before the full depth has decided."""

    def refusal(self, family: Family) -> str | None:
        """What the family lacks for it; None if nothing."""
        return None

    def at(self, depth: int) -> Sampler:
        """The same for models of L = `depth`, with the numbers that were left to be chosen.

        Raises:
            UserError: the depth doesn't fit the settings.
        """
        return self

    def for_model(self, model: FoldedModel) -> Sampler:
        """The same for this model.

        Raises:
            UserError: it can't be used with it.
        """
        problem = self.refusal(model.family)
        if problem is not None:
            raise UserError(f"sampler {self.name}: {problem}")
        return self.at(model.total_depth)

    @property
    def program(self) -> Sampler:
        """The settings that decide code; the others have their defaults, and are in `numbers`."""
        return self

    def numbers(self) -> PyTree:
        """The settings that are run-time numbers, so that changing them compiles nothing anew."""
        return ()

    def carry(self, model: FoldedModel, rows: int) -> Carried:
        """What stands in `Carried` before the first block."""
        return Carried()

    @property
    def prefills(self) -> bool:
        """Whether prompts go through all depths before the first block; otherwise `with_prompts` gets them."""
        return True

    def with_prompts(self, carried: Carried, tokens: Any) -> Carried:
        """What stands in `Carried` before the first block of prompts [B, N], of which nothing is in the caches yet."""
        raise NotImplementedError

    def decode(
        self, choosing: Choosing, model: FoldedModel, progress: Progress, slots: PyTree, carried: Carried, asked: Asked
    ) -> Block:
        """Up to `asked.limit` further tokens, or some more, of every row that isn't done; jitted."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Name and settings that aren't defaults, as a part of file names: "adaptive-threshold-0.05"."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join([self.name, *(f"{f.name}-{getattr(self, f.name)}" for f in changed)])

    def _require(self, condition: bool, key: str, problem: str) -> None:
        """Refuse a setting unless the condition holds."""
        if not condition:
            raise UserError(f"sampler.{key} {getattr(self, key):g}: {problem}")


def of_rows(flags: jax.Array, like: Any) -> jax.Array:
    """Flags [B] that broadcast against [B, ...]."""
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def needs_depths_apart(family: Family) -> str | None:
    """Why positions can't go together through the depths and come to what they would one after the other; None if they
    can."""
    flags = family.flags
    if flags.halts:
        return f"tokens of this model ({family.headline()}) stop by a rule of their own; turn that rule off"
    if not flags.depths_apart:
        return (
            f"it needs keys of every depth, which model.cache {family.config.cache} doesn't keep apart; "
            "take another rule with --cache"
        )
    return None
