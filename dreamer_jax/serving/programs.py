"""The compiled programs of a served engine: a chunk of a prompt and the logarithms of its tokens, a row that joins, a
tick of a group's rows.

Keys and values of all rows lie in one pool of pages, which every program gets, and gives back changed. Rows of a group
have their places in its arrays for good; whoever has a place is the host's business, which hands in what belongs to
it with every tick: its pages, its settings, and whether anybody has it at all. What only the device knows, where each
row is and what is on its way, stays there from tick to tick, so that nothing waits for the host.

On a mesh every device runs them with places and a pool of its own: B below is then of one device, and a table has
numbers of the device's own pages. What the host hands in has all devices' one behind the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dreamer_jax.blocks.memory import NOWHERE, for_kernels, in_pages
from dreamer_jax.inference.model import Flight, FoldedModel, PyTree
from dreamer_jax.inference.programs import LOGITS, Kinds
from dreamer_jax.inference.samplers import adaptive, lossless, one_by_one, wavefront
from dreamer_jax.inference.samplers.contract import (
    Asked,
    Block,
    Carried,
    Choosing,
    Chosen,
    Logprobs,
    Progress,
    Sampler,
)
from dreamer_jax.inference.samplers.criteria import Name
from dreamer_jax.inference.sampling import SamplingNumbers
from dreamer_jax.inference.sharding import ModelSharding, jitted


@dataclass(frozen=True)
class OneByOne(Sampler):
    """One token of each row after the other, every row at its own depth: the program of both static and adaptive rows.
    A static one is an adaptive one whose threshold is never reached.

    Attributes:
        criterion: of adaptive rows; None where the family has none, and no row stops but by the family's own rule.
    """

    name: ClassVar[str] = "one-by-one"
    rows_apart: ClassVar[bool] = True

    criterion: Name | None = None

    def numbers(self) -> Any:
        """Of a static row."""
        return () if self.criterion is None else (np.float32(-np.inf), np.int32(1), np.int32(1))

    def carry(self, model: FoldedModel, rows: int) -> Carried:
        """Nothing is on its way."""
        return one_by_one.carry(model, rows, self._rule_for(self.numbers()))

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """Depth steps of all rows."""
        return one_by_one.decode(choosing, model, progress, slots, carried, asked, self._rule_for)

    def _rule_for(self, numbers: Any) -> one_by_one.Rule:
        return one_by_one.NEVER if self.criterion is None else adaptive.rule(self.criterion, *numbers)


class Row(NamedTuple):
    """What a row is from its beginning, [1] int32 each, so that each device can get one of its own.

    Attributes:
        place: in its group; B where no row joins.
        length: of its prompt.
        number: of the text among those of its seed.
        limit: position of the last token that it may get.
        depth: L of its passes.
    """

    place: Any
    length: Any
    number: Any
    limit: Any
    depth: Any


class Rows(NamedTuple):
    """What the host hands in with a tick.

    Attributes:
        table: [B, M] int32, pages of each row; the number of all pages where it has none.
        alive: [B] bool, there is a row, and it goes on.
        stop_ids: [B, N] int32, tokens that end it.
        sampling: [B] each.
        settings: of the sampler, [B] each.
        rounds: most rounds of the tick.
        collect: see `Asked`.
    """

    table: Any
    alive: Any
    stop_ids: Any
    sampling: SamplingNumbers
    settings: PyTree
    rounds: Any
    collect: Any


class Brought(NamedTuple):
    """What a tick has brought, for the host.

    Attributes:
        tokens, depths, logprobs: as of `Block`.
        rounds, borders: [1], as of `Block`.
        work: [1], depth steps of all positions.
        in_flight: [B, W] int32, depths that positions on their way have gone through, the oldest first; -1: none.
    """

    tokens: jax.Array
    depths: jax.Array
    logprobs: Any
    rounds: jax.Array
    borders: jax.Array
    work: jax.Array
    in_flight: jax.Array


def pool(pages: int, size: int, model: FoldedModel) -> PyTree:
    """Empty pages of so many positions."""
    return for_kernels(model.empty_slots(pages, size), model.family.operations)


def places(sampler: Sampler, rows: int, model: FoldedModel) -> tuple[Progress, Carried]:
    """B places that nobody has."""
    return nobody(rows), sampler.carry(model, rows)


def nobody(rows: int) -> Progress:
    """Of B rows of which none is there."""
    none = jnp.zeros(rows, jnp.int32)
    return Progress(none, none, none == 0, none, none, none + 1)


def chunk(
    model: FoldedModel,
    pool: PyTree,
    table: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
    depth: jax.Array,
) -> tuple[jax.Array, jax.Array, PyTree]:
    """A chunk of one prompt through all its depths.

    Args:
        table: [1, M] int32.
        tokens: [1, P] int32, at positions start .. start + P - 1. What lies at or after `length` is padding, and leaves
            nothing: its pages may be another request's, or somebody's before.
        start, length, depth: [1] int32, of the chunk; of the prompt; L of its passes.

    Returns:
        What the head will be applied to: at the prompt's last position [1, h], if that is in this chunk, and at all
        positions [1, P, h]; and the pool.
    """
    positions, own = start + jnp.arange(tokens.shape[1])[None], depth[0]
    positions = jnp.where(positions < length, positions, NOWHERE)

    def deeper(l: jax.Array, carry: tuple[Flight, PyTree]) -> tuple[Flight, PyTree]:
        flight, slots = carry
        moves = l < own  # prompts of other devices may go deeper
        new, slots = model.step(flight, jnp.where(moves, positions, NOWHERE), l, slots, own)
        state = jax.tree.map(lambda its, kept: jnp.where(moves, its, kept), new.state, flight.state)
        return new._replace(state=state), slots

    entered = model.enter(tokens, positions, in_pages(pool, table))
    flight, slots = jax.lax.fori_loop(0, model.largest(own), deeper, entered)
    found, slots = model.leave(flight, positions, slots)
    last = jnp.clip(length - 1 - start, 0, tokens.shape[1] - 1)
    return jnp.take_along_axis(found, last[:, None, None], axis=1)[:, 0], found, in_pages(slots, None)


def score(likeliest: int, model: FoldedModel, found: jax.Array, tokens: jax.Array) -> Logprobs:
    """Log-probabilities [P] of the tokens [1, P] that follow a chunk's positions, and of the likeliest ones.

    Args:
        found: [1, P, h], of `chunk`.
    """

    def of_position(both: tuple[jax.Array, jax.Array]) -> Logprobs:
        hidden, token = both
        return Logprobs.of(model.logits(hidden[None])[0], token, max(1, likeliest))  # `map` can't bear empty arrays

    rows = max(1, LOGITS // model.config.vocab_size)  # positions whose logits fit
    return jax.lax.map(of_position, (found[0], tokens[0]), batch_size=min(rows, tokens.shape[1]))


def join(
    kinds: Kinds,
    model: FoldedModel,
    hidden: jax.Array,
    progress: Progress,
    carried: Carried,
    row: Row,
    sampling: SamplingNumbers,
    stop_ids: jax.Array,
) -> tuple[Progress, Carried, Chosen]:
    """A row after its prompt, with the first token behind it, in a place of a group; nothing of it is on its way.

    Args:
        hidden: [1, h], what the last chunk has found.
        progress, carried: of the group.
        sampling, stop_ids: as of `Rows`, of this row: [1] each, [1, N].

    Returns:
        The group's, and the first token [1].
    """
    asked = Asked(jnp.int32(1), stop_ids, sampling, ())
    chosen = asked.choose(kinds.choosing, model.logits(hidden), row.number, row.length)
    done = asked.ends(chosen.token) | (row.length >= row.limit)
    own = Progress(chosen.token, row.length, done, row.number, row.limit, row.depth)
    fresh = kinds.sampler.carry(model, 1)

    def put(kept: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        where = row.place * new.shape[axis] + jnp.arange(new.shape[axis])
        return kept.at[(slice(None),) * axis + (where,)].set(new.astype(kept.dtype), mode="drop")

    progress = jax.tree.map(functools.partial(put, axis=0), progress, own)
    by_row = jax.tree.map(functools.partial(put, axis=0), carried.by_row, fresh.by_row)
    by_slot = jax.tree.map(functools.partial(put, axis=1), carried.by_slot, fresh.by_slot)
    return progress, Carried(by_row, by_slot), chosen


def tick(
    kinds: Kinds,
    limit: int,
    at_once: int,
    model: FoldedModel,
    pool: PyTree,
    progress: Progress,
    carried: Carried,
    rows: Rows,
) -> tuple[PyTree, Progress, Carried, Brought]:
    """Some rounds of a group's sampler; a row gets at most about `limit` tokens. What is on its way at the end goes on
    with the next tick. A round takes `at_once` rows further."""
    progress = progress._replace(done=progress.done | ~rows.alive)
    numbers = rows.stop_ids, rows.sampling, rows.settings, rows.rounds, rows.collect
    asked = Asked(jnp.int32(limit), *numbers, at_once)
    slots = in_pages(pool, rows.table)
    block = kinds.sampler.decode(kinds.choosing, model, progress, slots, carried, asked)
    flying = in_flight(block.carried.by_row, block.progress)
    rounds, borders = jnp.reshape(block.rounds, 1), jnp.reshape(block.borders, 1)
    work = jnp.sum(block.tally.work, keepdims=True)
    brought = Brought(block.tokens, block.depths, block.logprobs, rounds, borders, work, flying)
    return in_pages(block.slots, None), block.progress, block.carried, brought


def in_flight(carried: Any, progress: Progress) -> jax.Array:
    """[B, W], see `Brought`."""
    if isinstance(carried, one_by_one.Walk):
        return carried.depths[:, None]
    if isinstance(carried, lossless.Wave):
        lanes = carried.tokens.shape[1]
        oldest_first = (progress.positions[:, None] + jnp.arange(lanes)) % lanes
        return jnp.take_along_axis(carried.depths, oldest_first, axis=1)
    if isinstance(carried, wavefront.Wave):
        return jnp.where(jnp.arange(carried.counts.shape[1]) < carried.length[:, None], carried.counts, -1)
    return jnp.zeros((len(progress.last), 0), jnp.int32)


class Programs:
    """The functions above, jitted. Use `programs_for`.

    Args:
        sharding: None for one device.
    """

    def __init__(self, sharding: ModelSharding | None):
        model: Any = PartitionSpec()
        rows: Any = PartitionSpec()
        slots: Any = PartitionSpec()
        if sharding is not None:
            model, rows, slots = sharding.model, sharding.rows, sharding.slots
        group = rows, Carried(rows, slots)
        self.pool = jitted(pool, sharding, 2, (model,), slots)
        self.places = jitted(places, sharding, 2, (model,), group)
        self.chunk = jitted(chunk, sharding, 0, (model, slots, *[rows] * 5), (rows, rows, slots), donate=(1,))
        self.score = jitted(score, sharding, 1, (model, rows, rows), rows)
        self.join = jitted(join, sharding, 1, (model, rows, *group, *[rows] * 3), (*group, rows), donate=(4,))
        self.tick = jitted(tick, sharding, 3, (model, slots, *group, rows), (slots, *group, rows), donate=(4, 6))
        self._sharding = sharding

    def fixed(self, model: FoldedModel, arrays: PyTree) -> PyTree:
        """What a program has made, fixed to where the model's weights are.

        Arrays that jax was told where to put (weights that were read from a checkpoint, and what is computed from them)
        and arrays that it may put anywhere have programs of their own; what is fixed from the start has one only.
        """
        if self._sharding is not None:
            return arrays
        (device,) = jax.tree.leaves(model)[0].devices()
        return jax.device_put(arrays, device)


@functools.cache
def programs_for(sharding: ModelSharding | None) -> Programs:
    """The programs of a sharding; the same ones every time, so that nothing is compiled twice."""
    return Programs(sharding)
