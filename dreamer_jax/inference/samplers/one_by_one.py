"""One token after another: each goes through the depths alone, to the last or until it has stopped.

Rows don't wait for each other: every round takes one position of each row a depth further, at whatever depth it is, and
a row whose position has arrived has its next token in the next round. So rows that stop early come to more tokens in
as many rounds (continuous depth batching, arXiv 2608.09444).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import NOWHERE
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.inference.model import Flight, FoldedModel, PyTree, through_depths
from dreamer_jax.inference.samplers.contract import (
    DECODE_BLOCK,
    Asked,
    Block,
    Carried,
    Choosing,
    Chosen,
    Progress,
    as_long_as,
    of_rows,
)


class Rule(NamedTuple):
    """When a token needs no further depth.

    Attributes:
        start: (model, flight) -> what is compared with at the first check, arrays [B, ...].
        check: (model, flight, positions, slots, before) -> whether each row stops [B] bool, and what the next check
            compares with.
        least: depths that a token takes at least; the first check is after them. [] or [B].
        every: depths between two checks. [] or [B].
    """

    start: Callable[[FoldedModel, Flight], Any]
    check: Callable[[FoldedModel, Flight, jax.Array, PyTree, Any], tuple[jax.Array, Any]]
    least: jax.Array | int = 1
    every: jax.Array | int = 1


RuleFor = Callable[[PyTree], Rule]
"""The rule of rows with these settings, `Asked.settings`."""
NEVER = Rule(
    lambda model, flight: (), lambda model, flight, positions, slots, before: (jnp.zeros(len(positions), bool), before)
)
"""Only the family decides, by `Family.finished`."""


class Walk(NamedTuple):
    """One position of each row between two depths; its place is `Progress.positions`.

    Attributes:
        depths: [B] int32, that it has gone through; -1: the row has none on its way.
        arrived: [B] bool, it needs no further depth.
        state, inputs: of the flight, [B, 1, ...].
        before: what the rule's next check compares with, [B, ...].
        waited: [B] int32, rounds since the row was last part of one.
    """

    depths: jax.Array
    arrived: jax.Array
    state: PyTree
    inputs: PyTree
    before: PyTree
    waited: jax.Array


def carry(model: FoldedModel, rows: int, rule: Rule = NEVER) -> Carried:
    """Nothing is on its way."""

    def enter() -> tuple[Flight, Any]:
        places = jnp.zeros((rows, 1), jnp.int32)
        flight, _ = model.enter(places, places, model.empty_slots(rows, 1))
        return flight, rule.start(model, flight)

    flight, before = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(enter))
    none = jnp.full(rows, -1, jnp.int32)
    return Carried(Walk(none, none > 0, flight.state, flight.inputs, before, none * 0), flight.depths)


def decode(
    choosing: Choosing,
    model: FoldedModel,
    progress: Progress,
    slots: PyTree,
    carried: Carried,
    asked: Asked,
    rule_for: RuleFor = lambda settings: NEVER,
) -> Block:
    """Tokens until the rule stops them, or the family says that they have finished; a round is a depth step.

    What stands for the deeper keys and values of a position that has stopped is the family's rule. Tokens are read off
    and begun before a round, for several rows together (`Asked.collect`), and nothing is computed for a border that no
    row crosses.
    """

    def cross(part: Block, its: Asked, rows: jax.Array) -> Block:
        reads = rows & part.carried.by_row.arrived
        part = once(model.anywhere(reads), lambda part: read_off(choosing, model, part, reads, its), part)
        enters = rows & part.wanting(its.limit) & (part.carried.by_row.depths < 0)
        part = once(model.anywhere(enters), lambda part: launched(model, rule_for(its.settings), part, enters), part)
        return part._replace(borders=part.borders + 1)

    def go(part: Block, its: Asked, rows: jax.Array) -> Block:
        return deeper(model, rule_for(its.settings), part, rows)

    def step(block: Block) -> Block:
        walk = block.carried.by_row
        block = block._replace(carried=block.carried._replace(by_row=walk._replace(waited=walk.waited + 1)))
        return of_some(go, block, asked, moving(block, asked))._replace(rounds=block.rounds + 1)

    def body(block: Block) -> Block:
        block = as_long_as(due, lambda block: of_some(cross, block, asked, at_border(block, asked)), block)
        return once(model.anywhere(moving(block, asked)), step, block)

    def due(block: Block) -> jax.Array:
        """Whether tokens are read off and begun. Somebody moves, or all wait, and then it is due. Where it is due on
        one of the devices that go together, none of their rows waits."""
        waiting, wanting = at_border(block, asked), block.wanting(asked.limit)
        count = jnp.sum(waiting)
        full = False if asked.at_once is None else count >= asked.at_once
        return model.anywhere((count > 0) & (full | (count >= asked.collect * jnp.sum(wanting))))

    block = Block.empty(choosing, progress, slots, carried, DECODE_BLOCK)
    return as_long_as(functools.partial(asked.unfinished, model), body, block)


def at_border(block: Block, asked: Asked) -> jax.Array:
    """[B] bool, rows that are between two tokens."""
    walk = block.carried.by_row
    return block.wanting(asked.limit) & (walk.arrived | (walk.depths < 0))


def moving(block: Block, asked: Asked) -> jax.Array:
    """[B] bool, rows with a position that goes deeper."""
    walk = block.carried.by_row
    return block.wanting(asked.limit) & ~walk.arrived & (walk.depths >= 0)


def of_some(function: Callable[[Block, Asked, jax.Array], Block], block: Block, asked: Asked, rows: jax.Array) -> Block:
    """A function of a block, of `asked.at_once` rows of it: of those wanted [B] bool, that have waited longest.

    Args:
        function: (block of those rows, what is asked for them, which of them are wanted).
    """
    count = asked.at_once
    if count is None or count >= len(rows):
        return function(block, asked, rows)
    _, picks = jax.lax.top_k(jnp.where(rows, block.carried.by_row.waited, -1), count)
    return block.put_back(function(block.part(picks), asked.part(picks), rows[picks]), picks)


def once(condition: jax.Array, function: Callable[[Block], Block], block: Block) -> Block:
    """A function of a block, if the condition holds. It is a loop of one round, not a branch: XLA copies the memories
    that a branch changes, and lets a loop change them in place."""
    first = condition, block
    return jax.lax.while_loop(lambda both: both[0], lambda both: (both[0] & False, function(both[1])), first)[1]


def decode_in_step(
    choosing: Choosing, model: FoldedModel, progress: Progress, slots: PyTree, carried: Carried, asked: Asked
) -> Block:
    """Tokens that all take L of the model, all rows at the same depth, which is faster; a round is a token."""

    def round_(block: Block) -> Block:
        progress, going = block.progress, block.wanting(asked.limit)
        tokens, positions = progress.last[:, None], progress.positions[:, None]
        hidden, slots = through_depths(model, tokens, positions, block.slots)
        chosen = asked.choose(choosing, model.logits(hidden)[:, 0], progress.rows, progress.positions + 1)
        taken = jnp.full_like(progress.positions, model.total_depth)
        tally = block.tally.plus(going, taken, taken)
        return block._replace(slots=slots, tally=tally).grown(as_column(chosen), going * 1, taken, asked)

    return asked.in_rounds(model, round_, Block.empty(choosing, progress, slots, carried, DECODE_BLOCK))


def launched(model: FoldedModel, rule: Rule, block: Block, enters: jax.Array) -> Block:
    """With the newest token on its way in these rows [B] bool, which have none."""
    progress, walk = block.progress, block.carried.by_row
    places = jnp.where(enters, progress.positions, NOWHERE)[:, None]
    # Keys of its own depths need no clearing: it looks at none that it hasn't written.
    new, slots = model.enter(progress.last[:, None], places, block.slots)
    none = jnp.zeros_like(walk.depths)
    begun = Walk(none, none > 0, new.state, new.inputs, rule.start(model, new), none)
    carried = block.carried._replace(by_row=chosen_rows(enters, begun, walk))
    return block._replace(carried=carried, slots=slots)


def deeper(model: FoldedModel, rule: Rule, block: Block, moving: jax.Array) -> Block:
    """These rows [B] bool one depth further, and which positions have arrived."""
    progress, walk = block.progress, block.carried.by_row
    places = jnp.where(moving, progress.positions, NOWHERE)[:, None]
    index = jnp.clip(walk.depths, 0, progress.depths - 1)
    depth = Depth(of_positions(index), of_positions(progress.depths))
    flight = Flight(walk.state, walk.inputs, block.carried.by_slot)
    new, slots = model.step(flight, places, depth.index, block.slots, depth.total)

    taken = walk.depths + moving
    due = moving & (taken >= rule.least) & ((taken - rule.least) % rule.every == 0)
    stops, seen = rule.check(model, new, places, slots, walk.before)
    arrives = (taken >= progress.depths) | (stops & due)
    finished = model.family.finished(model.params, new.state, flight.state, depth)
    if finished is not None:
        arrives |= finished[:, 0]
    walk = walk._replace(
        depths=taken,
        arrived=walk.arrived | (moving & arrives),
        state=chosen_rows(moving, new.state, walk.state),
        before=chosen_rows(due, seen, walk.before),
        waited=jnp.where(moving, 0, walk.waited),
    )
    tally = block.tally.plus(moving, 1, 1)
    return block._replace(carried=Carried(walk, new.depths), slots=slots, tally=tally)


def read_off(choosing: Choosing, model: FoldedModel, block: Block, reads: jax.Array, asked: Asked) -> Block:
    """The tokens behind the positions of these rows [B] bool, which have arrived."""
    progress, walk = block.progress, block.carried.by_row
    places = jnp.where(reads, progress.positions, NOWHERE)
    last = jnp.where(reads, walk.depths, progress.depths) - 1
    slots = model.family.refill(model.params, walk.state, block.slots, last, places)
    hidden, slots = model.leave(Flight(walk.state, walk.inputs, None), places[:, None], slots)
    logits = model.logits(hidden)[:, 0]
    chosen = asked.choose(choosing, logits, progress.rows, progress.positions + 1)
    left = walk._replace(depths=jnp.where(reads, -1, walk.depths), arrived=walk.arrived & ~reads)
    block = block._replace(carried=block.carried._replace(by_row=left), slots=slots)
    return block.grown(as_column(chosen), reads * 1, walk.depths, asked)


def of_positions(numbers: jax.Array) -> jax.Array:
    """[B] as [B, 1]; of one row as [], which is faster."""
    return numbers[0] if len(numbers) == 1 else numbers[:, None]


def as_column(chosen: Chosen) -> Chosen:
    """[B, ...] as [B, 1, ...]."""
    return jax.tree.map(lambda leaf: leaf[:, None], chosen)


def chosen_rows(rows: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` in these rows [B] bool, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(of_rows(rows, a), a, b), new, old)
