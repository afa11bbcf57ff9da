"""What a sampler is: its settings, what it needs of a family, and its program for a block of decoding.

After the prompts every row has one token that isn't in the caches yet (`Progress`). A sampler is asked for a block: it
brings every row that isn't done some tokens further, in one compiled program. How it moves positions through the depths
is its own business; the four calls of `FoldedModel` (enter, step, leave, logits) are all that it has. It goes in rounds
(a depth step, an iteration, a draft with its check), and a block may end after any of them: what is on its way then is
carried to the next one. What decides whether a round, or a call of the model within it, takes place is asked with
`model.anywhere`, since devices that exchange rows have to go together.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import pages_like, pages_of_rows
from dreamer_jax.errors import UserError, number, whole
from dreamer_jax.families import Family
from dreamer_jax.inference.model import FoldedModel, PyTree
from dreamer_jax.inference.sampling import BROKEN, SamplingNumbers, choose

DECODE_BLOCK = 32
"""Tokens that a row is asked for at most in one call."""
UNBOUNDED = (1 << 31) - 1
"""Rounds that no block comes to."""


class Progress(NamedTuple):
    """Where each row of a batch is.

    Attributes:
        last: [B] int32, the newest token, not yet in the caches.
        positions: [B] int32, its position.
        done: [B] bool, the newest token ends the row.
        rows: [B] int32, the number of the row among all that are generated.
        limits: [B] int32, the position of the last token that may be generated.
        depths: [B] int32, L of the row's passes, at most the model's.
    """

    last: jax.Array
    positions: jax.Array
    done: jax.Array
    rows: jax.Array
    limits: jax.Array
    depths: jax.Array


class Choosing(NamedTuple):
    """How tokens are chosen, as far as it decides the code of a program.

    Attributes:
        draws, ranks: of `Sampling`.
        logprobs: of how many likeliest tokens logarithms are wanted beside the chosen one's; None for none at all.
    """

    draws: bool = False
    ranks: bool = False
    logprobs: int | None = None


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities before temperature and filters.

    Attributes:
        chosen: [...] float32, the chosen token's.
        ids: [..., K] int32, the likeliest tokens, in order.
        values: [..., K] float32, theirs.
    """

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, token: jax.Array, likeliest: int) -> Logprobs:
        """From logits [..., V], of the tokens [...] that were chosen and the K likeliest."""
        logs = jax.nn.log_softmax(logits)
        values, ids = jax.lax.top_k(logs, likeliest)
        return cls(jnp.take_along_axis(logs, token[..., None], axis=-1)[..., 0], ids.astype(jnp.int32), values)


class Chosen(NamedTuple):
    """Tokens that were chosen, int32, and their `Logprobs`, or () where none are wanted."""

    token: jax.Array
    logprobs: Any


class Asked(NamedTuple):
    """What a block is asked for; run-time numbers.

    Attributes:
        limit: tokens that every row is to get, at most `DECODE_BLOCK`.
        stop_ids: [N] int32, tokens that end a row; or [B, N], of each row its own.
        sampling: see there.
        settings: the sampler's own, see `Sampler.numbers`.
        rounds: most rounds of the block.
        collect: of samplers with `rows_apart`: rows between two tokens wait until they are this share of the rows that
            want tokens, so that the weights of prelude, coda and head are read for several of them at once. 0: none
            waits; 1: all wait for the slowest.
        at_once: of the same samplers, over memories in pages: so many rows go through the model at once, and the others
            wait; static. None: all.
    """

    limit: jax.Array
    stop_ids: jax.Array
    sampling: SamplingNumbers
    settings: PyTree
    rounds: jax.Array | int = UNBOUNDED
    collect: jax.Array | float = 0.0
    at_once: int | None = None

    def choose(self, choosing: Choosing, logits: jax.Array, rows: jax.Array, positions: jax.Array) -> Chosen:
        """The token at these positions [B] from logits [B, V]; see `sampling.choose`."""
        token = choose(logits, self.sampling, rows, positions, choosing.draws, choosing.ranks)
        if choosing.logprobs is None:
            return Chosen(token, ())
        return Chosen(token, Logprobs.of(logits, token, choosing.logprobs))

    def ends(self, tokens: jax.Array) -> jax.Array:
        """Which of the tokens [B, N] or [B] end their row; `BROKEN` ends any."""
        stops = self.stop_ids
        stops = stops.reshape(stops.shape[0], *[1] * (tokens.ndim - 1), -1) if stops.ndim == 2 else stops
        return jnp.any(tokens[..., None] == stops, axis=-1) | (tokens == BROKEN)

    def part(self, picks: jax.Array) -> Asked:
        """What is asked for these rows [b] int32, of numbers that each row has for itself."""

        def of(numbers: Any) -> Any:
            return jax.tree.map(lambda each: each[picks] if jnp.ndim(each) else each, numbers)

        stops = self.stop_ids[picks] if self.stop_ids.ndim == 2 else self.stop_ids
        return self._replace(stop_ids=stops, sampling=of(self.sampling), settings=of(self.settings))

    def unfinished(self, model: FoldedModel, block: Block) -> jax.Array:
        """Whether rows want tokens, and there haven't been `rounds` yet."""
        return (block.rounds < self.rounds) & model.anywhere(block.wanting(self.limit))

    def in_rounds(self, model: FoldedModel, round_: Callable[[Block], Block], block: Block) -> Block:
        """One round after another, as long as it is `unfinished`."""

        def body(block: Block) -> Block:
            return round_(block)._replace(rounds=block.rounds + 1)

        return as_long_as(functools.partial(self.unfinished, model), body, block)


def as_long_as(condition: Callable[[Block], jax.Array], function: Callable[[Block], Block], block: Block) -> Block:
    """A function of a block, again and again while a condition holds, on which devices may agree: that is done in the
    loop's body, since its condition is no place for a collective."""

    def body(both: tuple[jax.Array, Block]) -> tuple[jax.Array, Block]:
        block = function(both[1])
        return condition(block), block

    return jax.lax.while_loop(lambda both: both[0], body, (condition(block), block))[1]


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
        logprobs: of the tokens, [B, N, ...], or ().
        rounds: that it took; on a mesh those of one device's rows.
        borders: how often tokens were read off and begun, for `Asked.at_once` rows; of samplers with `rows_apart`.
    """

    tokens: jax.Array
    depths: jax.Array
    progress: Progress
    slots: PyTree
    carried: Carried
    tally: Tally
    logprobs: Any
    rounds: jax.Array
    borders: jax.Array

    @classmethod
    def empty(cls, choosing: Choosing, progress: Progress, slots: PyTree, carried: Carried, room: int) -> Block:
        """At its begin, with room for so many tokens of a row."""
        rows = progress.last.shape[0]
        nothing, logprobs = jnp.full((rows, room), -1, jnp.int32), ()
        if choosing.logprobs is not None:
            some = jnp.zeros((rows, room, choosing.logprobs), jnp.float32)
            logprobs = Logprobs(jnp.zeros((rows, room), jnp.float32), some.astype(jnp.int32), some)
        return cls(nothing, nothing, progress, slots, carried, Tally.none(rows), logprobs, jnp.int32(0), jnp.int32(0))

    @property
    def counts(self) -> jax.Array:
        """[B], tokens so far."""
        return jnp.sum(self.tokens >= 0, axis=1, dtype=jnp.int32)

    def wanting(self, limit: jax.Array) -> jax.Array:
        """[B] bool, rows that aren't done and have fewer tokens than asked for."""
        return ~self.progress.done & (self.counts < limit)

    def part(self, picks: jax.Array) -> Block:
        """These rows [b] int32 of it, all different; memories are in pages."""

        def of_slot(kept: jax.Array) -> jax.Array:
            apart = kept.reshape(kept.shape[0], self.rows, -1, *kept.shape[2:])[:, picks]
            return apart.reshape(kept.shape[0], -1, *kept.shape[2:])

        return self._map(lambda kept: kept[picks], of_slot, pages_of_rows(self.slots, picks))

    def put_back(self, part: Block, picks: jax.Array) -> Block:
        """With these rows as they are in the part, and whatever else it has changed."""

        def of_slot(kept: jax.Array, new: jax.Array) -> jax.Array:
            apart = kept.reshape(kept.shape[0], self.rows, -1, *kept.shape[2:])
            return apart.at[:, picks].set(new.reshape(kept.shape[0], len(picks), *apart.shape[2:])).reshape(kept.shape)

        slots = pages_like(part.slots, self.slots)
        block = self._map(lambda kept, new: kept.at[picks].set(new), of_slot, slots, part)
        return block._replace(rounds=part.rounds, borders=part.borders)

    @property
    def rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    def _map(self, of_row: Callable[..., Any], of_slot: Callable[..., Any], slots: PyTree, *others: Block) -> Block:
        """With functions applied to all arrays of rows, and of slots, of this block and of others."""
        trees = [
            (b._replace(slots=(), carried=b.carried.by_row, rounds=(), borders=()), b.carried.by_slot)
            for b in (self, *others)
        ]
        by_row, by_slot = zip(*trees, strict=True)
        block = jax.tree.map(of_row, *by_row)
        carried = Carried(block.carried, jax.tree.map(of_slot, *by_slot))
        return block._replace(slots=slots, carried=carried, rounds=self.rounds, borders=self.borders)

    def grown(self, chosen: Chosen, count: jax.Array, depths: jax.Array, asked: Asked) -> Block:
        """With new tokens at the end of each row, as far as the row goes: to a stop token, or to its limit.

        Args:
            chosen: the tokens, [B, N].
            count: [B], how many of them each row gets; 0 leaves a row as it is.
            depths: [B] or [B, N] int32, which their predecessors went through.
            asked: says what ends a row.
        """
        tokens = chosen.token
        progress, number = self.progress, jnp.arange(tokens.shape[1])
        ends = asked.ends(tokens)
        before = jnp.cumsum(ends, axis=1) - ends  # stop tokens before each
        room = progress.limits - progress.positions
        kept = (number < jnp.minimum(count, room)[:, None]) & (before == 0)
        taken = jnp.sum(kept, axis=1, dtype=jnp.int32)  # they are the first ones
        rows = jnp.arange(tokens.shape[0])[:, None]
        depths = jnp.broadcast_to(depths if depths.ndim == 2 else depths[:, None], tokens.shape)
        place = jnp.where(kept, self.counts[:, None] + number, self.tokens.shape[1])
        old = self.tokens, self.depths, self.logprobs
        new = jax.tree.map(lambda a, b: a.at[rows, place].set(b, mode="drop"), old, (tokens, depths, chosen.logprobs))
        newest = jnp.take_along_axis(tokens, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
        positions = progress.positions + taken
        done = progress.done | jnp.any(kept & ends, axis=1) | (positions >= progress.limits)
        last = jnp.where(taken > 0, newest, progress.last)
        tokens, depths, logprobs = new
        progress = progress._replace(last=last, positions=positions, done=done)
        return self._replace(tokens=tokens, depths=depths, logprobs=logprobs, progress=progress)


@dataclass(frozen=True)
class Sampler:
    """How positions go through the depths. A sampler is a frozen dataclass of its settings: the docstring of each is
    its help, and 0 stands for a number that is chosen."""

    name: ClassVar[str]
    early: ClassVar[bool] = False
    """Whether tokens may stop before the last depth."""
    drafts: ClassVar[bool] = False
    """Whether tokens are proposed before the full depth has decided."""
    rows_apart: ClassVar[bool] = False
    """Whether rows don't wait for each other, so that some can go through the model while others wait; see
    `Asked.at_once`."""

    def __post_init__(self) -> None:
        """Refuses settings that aren't numbers, or whole ones, where those are wanted, or are outside of a list of
        words."""
        for key, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, key)
            if kind is int:
                object.__setattr__(self, key, whole(value, f"sampler.{key}"))
                self._require(abs(value) < 2**31, key, "must be less than 2^31")
            elif kind is float:
                number(value, f"sampler.{key}")
            elif typing.get_origin(kind) is typing.Literal:
                words = typing.get_args(kind)
                self._require(value in words, key, f"must be one of {', '.join(words)}")

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
        """The settings that are run-time numbers, so that changing them compiles nothing anew. They are not on the
        device: nobody has to wait for it to look at them."""
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
        raise NotImplementedError(f"{type(self).__name__} has no decode")

    @property
    def label(self) -> str:
        """Name and settings that aren't defaults, as a part of file names: "adaptive-threshold-0.05"."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join([self.name, *(f"{f.name}-{getattr(self, f.name)}" for f in changed)])

    def _require(self, condition: bool, key: str, problem: str) -> None:
        """Refuse a setting unless the condition holds."""
        if not condition:
            value = getattr(self, key)
            written = f"{value:g}" if isinstance(value, float) else value
            raise UserError(f"sampler.{key} {written}: {problem}")


def of_rows(flags: jax.Array, like: Any) -> jax.Array:
    """Flags [B] that broadcast against [B, ...]."""
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def needs_depths_apart(family: Family) -> str | None:
    """Why positions can't go together through the depths and come to what they would one after the other; None if they
    can."""
    flags = family.flags
    if flags.halts:
        return (
            f"tokens of this model ({family.headline()}) stop by the rule it was trained with; take the sampler static"
        )
    if not flags.depths_apart:
        return (
            f"it needs keys of every depth, which model.cache {family.config.cache} doesn't keep apart; "
            "take another rule with --cache"
        )
    return None
