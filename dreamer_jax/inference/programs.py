"""The jitted programs of the engine: prefill, blocks of decoding, scores. Compiled once for each bucket of shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dreamer_jax.blocks.memory import for_rows
from dreamer_jax.inference.model import FoldedModel, PyTree, through_depths
from dreamer_jax.inference.samplers import Sampler, Static
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress
from dreamer_jax.inference.sharding import ModelSharding, jitted

LOGITS = 1 << 24
"""Logits that are held at once when scoring."""


class Kinds(NamedTuple):
    """What decides the code of a program rather than its numbers.

    Attributes:
        choosing: how tokens are chosen.
        sampler: how positions go through the depths, see `Sampler.program`.
    """

    choosing: Choosing = Choosing()
    sampler: Sampler = Static()


def prefill(
    kinds: Kinds,
    model: FoldedModel,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    slots: PyTree,
    hidden: jax.Array,
) -> tuple[jax.Array, PyTree]:
    """One chunk of the prompts.

    Args:
        tokens: [B, P] int32; row b's are at positions start[b] .. start[b] + P - 1. What lies at or after
            lengths[b] is padding, and its slots are written again before anything looks at them.
        start, lengths: [B] int32.
        hidden: [B, h], what the head will be applied to at each prompt's last position, as far as it has come.

    Returns:
        `hidden` and the slots.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    found, slots = through_depths(model, tokens, positions, slots)
    last = lengths - 1 - start
    own = jnp.take_along_axis(found, jnp.clip(last, 0, tokens.shape[1] - 1)[:, None, None], axis=1)[:, 0]
    here = (last >= 0) & (last < tokens.shape[1])
    return jnp.where(here[:, None], own, hidden), slots


def first(
    kinds: Kinds,
    model: FoldedModel,
    hidden: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    limits: jax.Array,
    asked: Asked,
) -> tuple[Progress, Any]:
    """The first token after prompts of these lengths [B], from what `prefill` has found for them [B, h]; and its
    `Logprobs`, or ()."""
    token, logprobs = asked.choose(kinds.choosing, model.logits(hidden), rows, lengths)
    done = asked.ends(token) | (lengths >= limits)
    return Progress(token, lengths, done, rows, limits, jnp.full_like(lengths, model.total_depth)), logprobs


def decode(
    kinds: Kinds, model: FoldedModel, progress: Progress, slots: PyTree, carried: Carried, asked: Asked
) -> Block:
    """Further tokens of every row that isn't done, as the sampler goes about it."""
    return kinds.sampler.decode(kinds.choosing, model, progress, slots, carried, asked)


def score(
    kinds: Kinds, model: FoldedModel, tokens: jax.Array, targets: jax.Array, start: jax.Array, slots: PyTree
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Log-probability of each target [B, P] after its position, and whether it is the likeliest token.

    Args:
        tokens, targets: [B, P] int32, at positions start .. start + P - 1 of every row.
        start: scalar int32.
    """
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, slots = through_depths(model, tokens, positions, slots)
    rows = max(1, LOGITS // (tokens.shape[0] * model.config.vocab_size))  # positions whose logits fit

    def of_position(both):
        hidden, target = both
        logits = model.logits(hidden)  # [B, V]
        picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    by_position = jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(targets, 0, 1)
    logprobs, greedy = jax.lax.map(of_position, by_position, batch_size=min(rows, tokens.shape[1]))
    return logprobs.T, greedy.T, slots


def empty_slots(model: FoldedModel, rows: int, capacity: int) -> PyTree:
    """See `FoldedModel.empty_slots`; as this platform's attention wants them."""
    return for_rows(model.empty_slots(rows, capacity), model.family.operations)


class Programs:
    """The programs, jitted; the first argument of each is its `Kinds`. Use `programs_for`.

    Args:
        sharding: None for one device.
    """

    def __init__(self, sharding: ModelSharding | None):
        model: Any = PartitionSpec()
        rows: Any = PartitionSpec()
        slots: Any = PartitionSpec()
        same: Any = PartitionSpec()
        if sharding is not None:
            model, rows, slots = sharding.model, sharding.rows, sharding.slots
        self._sharding = sharding
        progress, carried = rows, Carried(rows, slots)
        inputs = model, rows, rows, rows, slots, rows
        self.prefill = jitted(prefill, sharding, 1, inputs, (rows, slots), donate=(5, 6))
        self.first = jitted(first, sharding, 1, (model, rows, rows, rows, rows, same), (progress, rows))
        block = Block(rows, rows, progress, slots, carried, rows, rows, same, same)
        self.decode = jitted(decode, sharding, 1, (model, progress, slots, carried, same), block, donate=(3, 4))
        self.score = jitted(score, sharding, 1, (model, rows, rows, same, slots), (rows, rows, slots), donate=(5,))
        self.empty_slots: Any = self._made(empty_slots, slots)
        self.carry: Any = self._made(lambda model, sampler, rows: sampler.carry(model, rows), carried)

    def _made(self, function: Callable[..., Any], specs: Any) -> Any:
        """A program (model, two that are static) that makes arrays with these specs."""
        where = None if self._sharding is None else self._sharding.named(specs)
        return jax.jit(function, static_argnums=(1, 2), out_shardings=where)


@functools.cache
def programs_for(sharding: ModelSharding | None) -> Programs:
    """The programs of a sharding; the same ones every time, so that nothing is compiled twice."""
    return Programs(sharding)
