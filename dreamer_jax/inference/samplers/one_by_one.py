"""One token after another: each goes through the depths alone, to the last or until it has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.families import depth_of
from dreamer_jax.inference.model import Flight, FoldedModel, PyTree
from dreamer_jax.inference.samplers.contract import (
    DECODE_BLOCK,
    NOWHERE,
    Asked,
    Block,
    Carried,
    Choosing,
    Progress,
    of_rows,
)

Through = Callable[[jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree, jax.Array]]
"""(tokens [B, 1], positions [B, 1], slots) -> what the head is applied to, the slots, and depths taken [B]."""


class Rule(NamedTuple):
    """When a token needs no further depth.

    Attributes:
        start: (model, flight) -> what is compared with at the first check.
        check: (model, flight, positions, slots, before) -> whether each row stops [B] bool, and what the next check
            compares with.
        least: depths that a token takes at least; the first check is after them.
        every: depths between two checks.
    """

    start: Callable[[FoldedModel, Flight], Any]
    check: Callable[[FoldedModel, Flight, jax.Array, PyTree, Any], tuple[jax.Array, Any]]
    least: jax.Array | int = 1
    every: jax.Array | int = 1


NEVER = Rule(lambda model, flight: (), lambda model, flight, positions, slots, before: (jnp.bool_(False), before))
"""Only the family decides, by `Family.finished`."""


def decode(
    choosing: Choosing, model: FoldedModel, progress: Progress, slots: PyTree, asked: Asked, through: Through
) -> Block:
    """A block of tokens, each of which goes `through` the depths before the next one is chosen."""

    def body(block: Block) -> Block:
        progress = block.progress
        hidden, slots, taken = through(progress.last[:, None], progress.positions[:, None], block.slots)
        logits = model.logits(hidden)[:, 0]
        token = asked.choose(choosing, logits, progress.rows, progress.positions + 1)
        going = block.wanting(asked.limit)
        tally = block.tally.plus(going, taken, taken)
        return block._replace(slots=slots, tally=tally).grown(token[:, None], going * 1, taken, asked.stop_ids)

    def unfinished(block: Block) -> jax.Array:
        return jnp.any(block.wanting(asked.limit))

    return jax.lax.while_loop(unfinished, body, Block.empty(progress, slots, Carried(), DECODE_BLOCK))


def until_stopped(
    model: FoldedModel, tokens: jax.Array, positions: jax.Array, slots: PyTree, rule: Rule = NEVER
) -> tuple[jax.Array, PyTree, jax.Array]:
    """Tokens [B, 1] at these positions through the depths until the rule stops them, or the family says that they have
    finished.

    What stands for the deeper keys and values of a row that has stopped is the family's rule. The batch goes on until
    all rows have stopped.

    Returns:
        What the head is applied to [B, 1, h], the slots, and how many depths each row took, [B] int32.
    """
    family = model.family

    def body(carry):
        l, flight, slots, before, running, depths = carry
        # Rows that have stopped leave no further keys: those they left last may have to stand for deeper ones.
        new, slots = model.step(flight, jnp.where(running[:, None], positions, NOWHERE), l, slots)
        checked = (l + 1 >= rule.least) & ((l + 1 - rule.least) % rule.every == 0)
        stops, seen = rule.check(model, new, positions, slots, before)
        before = jax.tree.map(lambda a, b: jnp.where(checked, a, b), seen, before)
        goes_on = running & ~(stops & checked)
        finished = family.finished(model.params, new.state, flight.state, depth_of(l, model.total_depth))
        if finished is not None:
            goes_on &= ~finished[:, 0]
        state = jax.tree.map(lambda a, b: jnp.where(of_rows(running, a), a, b), new.state, flight.state)
        return l + 1, new._replace(state=state), slots, before, goes_on, depths + running

    def unfinished(carry):
        return (carry[0] < model.total_depth) & jnp.any(carry[4])

    rows = positions.shape[0]
    flight, slots = model.enter(tokens, positions, slots)
    start = jnp.int32(0), flight, slots, rule.start(model, flight), jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32)
    _, flight, slots, _, _, depths = jax.lax.while_loop(unfinished, body, start)
    slots = family.refill(model.params, flight.state, slots, depths - 1, positions[:, 0])
    return *model.leave(flight, positions, slots), depths
