"""One token after another: each goes through the depths alone, to the last or until it has stopped.

Rows don't wait for each other: every round takes one position of each row a depth further, at whatever depth it is, and
a row whose position has arrived has its next token in the next round. So rows that stop early come to more tokens in
as many rounds (continuous depth batching, arXiv 2608.09444).
"""

from __future__ import annotations

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
    """

    depths: jax.Array
    arrived: jax.Array
    state: PyTree
    inputs: PyTree
    before: PyTree


def carry(model: FoldedModel, rows: int, rule: Rule = NEVER) -> Carried:
    """Nothing is on its way."""

    def enter() -> tuple[Flight, Any]:
        places = jnp.zeros((rows, 1), jnp.int32)
        flight, _ = model.enter(places, places, model.empty_slots(rows, 1))
        return flight, rule.start(model, flight)

    flight, before = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(enter))
    none = jnp.full(rows, -1, jnp.int32)
    return Carried(Walk(none, none > 0, flight.state, flight.inputs, before), flight.depths)


def decode(
    choosing: Choosing,
    model: FoldedModel,
    progress: Progress,
    slots: PyTree,
    carried: Carried,
    asked: Asked,
    rule: Rule = NEVER,
) -> Block:
    """Tokens until the rule stops them, or the family says that they have finished; a round is a depth step.

    What stands for the deeper keys and values of a position that has stopped is the family's rule.
    """

    def round_(block: Block) -> Block:
        going = block.wanting(asked.limit)
        block = launched(model, rule, block, going)
        block = deeper(model, rule, block, going)
        return read_off(choosing, model, block, going, asked)

    return asked.in_rounds(round_, Block.empty(choosing, progress, slots, carried, DECODE_BLOCK))


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

    return asked.in_rounds(round_, Block.empty(choosing, progress, slots, carried, DECODE_BLOCK))


def launched(model: FoldedModel, rule: Rule, block: Block, going: jax.Array) -> Block:
    """With the newest token on its way in the rows that have none."""
    progress, walk = block.progress, block.carried.by_row
    enters = going & (walk.depths < 0)

    def enter(slots: PyTree) -> tuple[Walk, PyTree]:
        places = jnp.where(enters, progress.positions, NOWHERE)[:, None]
        new, slots = model.enter(progress.last[:, None], places, slots)
        begun = Walk(jnp.zeros_like(walk.depths), walk.arrived & False, new.state, new.inputs, rule.start(model, new))
        return chosen_rows(enters, begun, walk), slots

    # Keys of its own depths need no clearing: it looks at none that it hasn't written.
    walk, slots = jax.lax.cond(jnp.any(enters), enter, lambda slots: (walk, slots), block.slots)
    return block._replace(carried=block.carried._replace(by_row=walk), slots=slots)


def deeper(model: FoldedModel, rule: Rule, block: Block, going: jax.Array) -> Block:
    """One depth further, and which positions have arrived."""
    progress, walk = block.progress, block.carried.by_row
    moving = going & ~walk.arrived
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
    )
    tally = block.tally.plus(moving, 1, 1)
    return block._replace(carried=Carried(walk, new.depths), slots=slots, tally=tally)


def read_off(choosing: Choosing, model: FoldedModel, block: Block, going: jax.Array, asked: Asked) -> Block:
    """The tokens behind positions that have arrived."""
    progress, walk = block.progress, block.carried.by_row
    reads, moving = going & walk.arrived, going & ~walk.arrived
    reads &= (jnp.sum(reads) >= asked.collect) | ~jnp.any(moving)

    def read(slots: PyTree) -> tuple[Chosen, PyTree]:
        places = jnp.where(reads, progress.positions, NOWHERE)
        last = jnp.where(reads, walk.depths, progress.depths) - 1
        slots = model.family.refill(model.params, walk.state, slots, last, places)
        hidden, slots = model.leave(Flight(walk.state, walk.inputs, None), places[:, None], slots)
        logits = model.logits(hidden)[:, 0]
        return asked.choose(choosing, logits, progress.rows, progress.positions + 1), slots

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(read, block.slots)[0])
    chosen, slots = jax.lax.cond(jnp.any(reads), read, lambda slots: (nothing, slots), block.slots)
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
