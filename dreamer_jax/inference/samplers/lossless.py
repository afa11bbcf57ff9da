"""Lossless wavefront: positions at different depths in flight together, and still the text of plain decoding.

Keys and values are kept for every depth, so a position at depth l needs of earlier ones only what they have left at
depth l: it may follow them before they have arrived. What it doesn't know is its own token. So

- every step takes all positions in flight one depth further;
- when the newest one has come to depth e, the head reads a guess of the next token off its state, and that enters;
- when the oldest one arrives at the last depth, the token behind it is chosen as plain decoding chooses it. If it is
  the guess that flies there, the flight goes on, and its next position is e steps from arriving. If not, everything
  behind is thrown away, and the right token enters.

A position only ever sees keys of right tokens when it arrives, each left at the same depth in the same way as in plain
decoding; keys of guesses that were thrown away are written again before anything looks at them, because whatever stands
behind the oldest position enters anew. Guesses are drawn with the key of their position, as the token itself will be: a
guess from the right distribution is the right token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.memory import NOWHERE
from dreamer_jax.errors import UserError
from dreamer_jax.inference.model import Flight, FoldedModel, PyTree
from dreamer_jax.inference.samplers.contract import (
    DECODE_BLOCK,
    Asked,
    Block,
    Carried,
    Choosing,
    Chosen,
    Progress,
    Sampler,
    needs_depths_apart,
)
from dreamer_jax.inference.samplers.one_by_one import chosen_rows


class Wave(NamedTuple):
    """W lanes for positions in flight; the position p of a row is in lane p mod W.

    Attributes:
        tokens: [B, W] int32.
        depths: [B, W] int32, depths that each has gone through; -1 in a lane without a position.
        ahead: [B] int32, positions in flight behind the oldest, whose position `Progress` has. -1: none is in flight.
        guess: [B] int32, the token that enters next behind the newest position; -1: none.
        state, inputs: of the flight, [B, W, ...].
    """

    tokens: jax.Array
    depths: jax.Array
    ahead: jax.Array
    guess: jax.Array
    state: PyTree
    inputs: PyTree


@dataclass(frozen=True)
class Lossless(Sampler):
    """A wavefront: tokens are guessed at an early depth and enter behind their predecessors, and what flies behind a
    wrong guess is thrown away. The text is that of all depths for every token, also with draws of the same seed."""

    name: ClassVar[str] = "lossless"
    drafts: ClassVar[bool] = True

    guess_depth: int = 0
    """Depth at which the next token is guessed. 0: a quarter of all, at least one."""
    wavefront: int = 0
    """Most positions in flight at once; 1 is plain decoding. 0: as many as there can be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.guess_depth >= 0, "guess_depth", "must be 0 (a quarter of all depths) or more")
        self._require(self.wavefront >= 0, "wavefront", "must be 0 (as many as there can be) or more")

    def refusal(self, family) -> str | None:
        """Positions have to come to the same together as one after the other."""
        return needs_depths_apart(family)

    def at(self, depth: int) -> Lossless:
        """With a guess below L, and as many lanes as there can be positions in flight: ceil(L / e)."""
        guess_depth = self.guess_depth or max(1, depth // 4)
        lanes = -(-depth // guess_depth)
        chosen = Lossless(guess_depth, min(self.wavefront or lanes, lanes))
        if depth < 2:
            raise UserError(f"depth {depth}: sampler {self.name} needs 2 or more")
        chosen._require(guess_depth < depth, "guess_depth", f"must be less than the depth of the model, {depth}")
        return chosen

    @property
    def program(self) -> Lossless:
        """How many lanes."""
        return Lossless(1, self.wavefront)

    def numbers(self):
        """The other one."""
        return np.int32(self.guess_depth)

    def carry(self, model: FoldedModel, rows: int) -> Carried:
        """Empty lanes."""
        shape = rows, self.wavefront
        places = jnp.zeros(shape, jnp.int32)
        none = jnp.full(rows, -1, jnp.int32)
        flight, _ = jax.eval_shape(lambda: model.enter(places, places, model.empty_slots(rows, 1)))
        flight = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), flight)
        return Carried(Wave(places, places - 1, none, none, flight.state, flight.inputs), flight.depths)

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """One depth step of all positions in flight after another."""

        def body(block: Block) -> Block:
            going = block.wanting(asked.limit)
            block = launched(model, block, going)
            wave, flight = block.carried.by_row, flight_of(block.carried)
            moving = (wave.depths >= 0) & going[:, None]
            places = places_of(wave, block.progress)
            total = jnp.broadcast_to(block.progress.depths[:, None], places.shape)
            stepped, slots = model.step(
                flight, jnp.where(moving, places, NOWHERE), jnp.maximum(wave.depths, 0), block.slots, total
            )
            # A row that rests keeps its flight; lanes without a position hold nothing that anybody asks for.
            wave = wave._replace(depths=wave.depths + moving, state=chosen_rows(going, stepped.state, wave.state))
            by_slot = jax.tree.map(chosen_flat(going), stepped.depths, flight.depths)
            tally = block.tally.plus(going, 1, jnp.sum(moving, axis=1))
            block = block._replace(carried=Carried(wave, by_slot), slots=slots, tally=tally)
            return read_off(choosing, model, block, going, asked)

        return asked.in_rounds(model, body, Block.empty(choosing, progress, slots, carried, DECODE_BLOCK))


def flight_of(carried: Carried) -> Flight:
    """The positions in the lanes."""
    return Flight(carried.by_row.state, carried.by_row.inputs, carried.by_slot)


def places_of(wave: Wave, progress: Progress) -> jax.Array:
    """[B, W], the position that each lane has or would have: the first at or behind the oldest one's."""
    lanes = wave.tokens.shape[1]
    return progress.positions[:, None] + (jnp.arange(lanes) - progress.positions[:, None]) % lanes


def chosen_flat(rows: jax.Array):
    """A function of two arrays [L, B W, ...]: the first one's where `rows` [B] are true."""

    def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
        flags = jnp.repeat(rows, a.shape[1] // rows.shape[0])
        return jnp.where(flags.reshape(1, -1, *[1] * (a.ndim - 2)), a, b)

    return chosen


def launched(model: FoldedModel, block: Block, going: jax.Array) -> Block:
    """With a position more in the rows where one is to enter: the newest token where nothing is in flight, else the
    guess behind the newest position."""
    wave, progress = block.carried.by_row, block.progress
    begins = wave.ahead < 0
    enters = going & (begins | (wave.guess >= 0))
    token = jnp.where(begins, progress.last, wave.guess)
    place = progress.positions + wave.ahead + 1

    def enter(args: tuple[Wave, PyTree]) -> tuple[Wave, PyTree]:
        wave, slots = args
        new, slots = model.enter(token[:, None], jnp.where(enters, place, NOWHERE)[:, None], slots)
        lane = (jnp.arange(wave.tokens.shape[1]) == (place % wave.tokens.shape[1])[:, None]) & enters[:, None]

        def put(its: jax.Array, kept: jax.Array) -> jax.Array:
            return jnp.where(lane.reshape(*lane.shape, *[1] * (kept.ndim - 2)), its, kept)

        # Keys of its own depths need no clearing: it looks at none that it hasn't written.
        return wave._replace(
            tokens=put(token[:, None], wave.tokens),
            depths=put(jnp.zeros_like(token)[:, None], wave.depths),
            ahead=wave.ahead + enters,
            guess=jnp.where(enters, -1, wave.guess),
            state=jax.tree.map(put, new.state, wave.state),
            inputs=jax.tree.map(put, new.inputs, wave.inputs),
        ), slots

    wave, slots = jax.lax.cond(model.anywhere(enters), enter, lambda args: args, (wave, block.slots))
    return block._replace(carried=block.carried._replace(by_row=wave), slots=slots)


def read_off(choosing: Choosing, model: FoldedModel, block: Block, going: jax.Array, asked: Asked) -> Block:
    """The token behind the oldest position, if that has arrived, and a guess behind the newest one, if it is time."""
    wave, progress, rows = block.carried.by_row, block.progress, jnp.arange(going.shape[0])
    lanes = wave.tokens.shape[1]
    oldest, newest = progress.positions, progress.positions + wave.ahead
    arrived = going & (wave.depths[rows, oldest % lanes] >= progress.depths)
    # No guess where no lane is free, nor of a token that nobody would enter: one behind the row's last.
    free = (wave.ahead + 1 < lanes) | arrived
    useful = going & (newest + 1 < progress.limits) & free & (~arrived | (wave.ahead > 0))
    guesses = useful & (wave.depths[rows, newest % lanes] >= asked.settings)

    def read(slots: PyTree) -> tuple[list[Chosen], PyTree]:
        places = jnp.stack([oldest, newest], axis=1)
        picked = places % lanes
        read = jnp.where(jnp.stack([arrived, guesses], axis=1), places, NOWHERE)
        state = jax.tree.map(lambda leaf: leaf[rows[:, None], picked], wave.state)
        hidden, slots = model.leave(Flight(state, (), None), read, slots)
        logits = model.logits(hidden)
        return [asked.choose(choosing, logits[:, i], progress.rows, places[:, i] + 1) for i in range(2)], slots

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(read, block.slots)[0])
    (chosen, guessed), slots = jax.lax.cond(
        model.anywhere(arrived | guesses), read, lambda slots: (nothing, slots), block.slots
    )
    token, guess = chosen.token, guessed.token
    # A token that ends the row needs no successor, and if it turns out wrong, none is lost.
    guesses &= ~asked.ends(guess)
    followed = arrived & (wave.ahead > 0)
    right = followed & (wave.tokens[rows, (oldest + 1) % lanes] == token)
    flushed = arrived & ~right
    leaving = (jnp.arange(lanes) == (oldest % lanes)[:, None]) & arrived[:, None]
    wave = wave._replace(
        depths=jnp.where(leaving | flushed[:, None], -1, wave.depths),
        ahead=jnp.where(flushed, -1, wave.ahead - right),
        guess=jnp.where(guesses & ~flushed, guess, wave.guess),  # a row that rests keeps the one it has
    )
    tally = block.tally.plus(going, 0, 0, followed, right)
    block = block._replace(carried=block.carried._replace(by_row=wave), slots=slots, tally=tally)
    chosen = jax.tree.map(lambda leaf: leaf[:, None], chosen)
    return block.grown(chosen, arrived * 1, progress.depths, asked)
