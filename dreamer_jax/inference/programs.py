"""The jitted programs of the engine: prefill, blocks of decoding, scores. Compiled once for each bucket of shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dreamer_jax.families import depth_of
from dreamer_jax.inference.model import FoldedModel, PyTree
from dreamer_jax.inference.sampling import SamplingNumbers, choose
from dreamer_jax.inference.sharding import ModelSharding

DECODE_BLOCK = 32
"""Tokens a row gets at most in one call of `decode`."""
LOGITS = 1 << 24
"""Logits that are held at once when scoring."""
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


def all_depths(model: FoldedModel, tokens: jax.Array, positions: jax.Array, slots: PyTree) -> tuple[jax.Array, PyTree]:
    """Tokens [B, P] at these positions through every depth: what the head is applied to [B, P, h], and the slots."""

    def body(l, carry):
        return model.step(carry[0], positions, l, carry[1])

    flight, slots = jax.lax.fori_loop(0, model.total_depth, body, model.enter(tokens, positions, slots))
    return model.leave(flight, positions, slots)


def until_settled(
    model: FoldedModel, tokens: jax.Array, positions: jax.Array, slots: PyTree, distance: jax.Array
) -> tuple[jax.Array, PyTree, jax.Array]:
    """Tokens [B, 1] at these positions through the depths until the residual stream stops changing, or they halt.

    A row stops after the depth at which |x' - x| / |x'| < `distance`, or when the family says that it has finished;
    what stands for its deeper keys and values is the family's rule. The batch goes on until all rows have stopped.
    With a distance of 0 only the family decides.

    Returns:
        What the head is applied to [B, 1, h], the slots, and how many depths each row took, [B] int32.
    """
    family = model.family

    def body(carry):
        l, flight, slots, running, depths = carry
        # Rows that have stopped leave no further keys: those they left last may have to stand for deeper ones.
        new, slots = model.step(flight, jnp.where(running[:, None], positions, NOWHERE), l, slots)
        before, after = (family.stream(f.state)[:, 0].astype(jnp.float32) for f in (flight, new))
        moved = jnp.linalg.norm(after - before, axis=-1) / jnp.linalg.norm(after, axis=-1)
        goes_on = running & ~(moved < distance)
        finished = family.finished(model.params, new.state, flight.state, depth_of(l, model.total_depth))
        if finished is not None:
            goes_on &= ~finished[:, 0]
        state = jax.tree.map(lambda a, b: jnp.where(_of_rows(running, a), a, b), new.state, flight.state)
        return l + 1, new._replace(state=state), slots, goes_on, depths + running

    def unfinished(carry):
        return (carry[0] < model.total_depth) & jnp.any(carry[3])

    rows = positions.shape[0]
    start = (jnp.int32(0), *model.enter(tokens, positions, slots), jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32))
    _, flight, slots, _, depths = jax.lax.while_loop(unfinished, body, start)
    slots = family.refill(model.params, flight.state, slots, depths - 1, positions[:, 0])
    return *model.leave(flight, positions, slots), depths


def _of_rows(flags: jax.Array, like: jax.Array) -> jax.Array:
    """Flags [B] that broadcast against [B, ...]."""
    return flags.reshape(-1, *[1] * (like.ndim - 1))


class Kinds(NamedTuple):
    """What decides the code of a program rather than its numbers.

    Attributes:
        draws, ranks: of `Sampling`.
        early_exit: whether tokens may stop before the last depth.
    """

    draws: bool = False
    ranks: bool = False
    early_exit: bool = False


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
    found, slots = all_depths(model, tokens, positions, slots)
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
    stop_ids: jax.Array,
    numbers: SamplingNumbers,
) -> Progress:
    """The first token after prompts of these lengths [B], from what `prefill` has found for them [B, h]."""
    token = choose(model.logits(hidden), numbers, rows, lengths, kinds.draws, kinds.ranks)
    done = jnp.isin(token, stop_ids) | (lengths >= limits)
    return Progress(token, lengths, done, rows, limits)


def decode(
    kinds: Kinds,
    model: FoldedModel,
    progress: Progress,
    slots: PyTree,
    limit: jax.Array,
    stop_ids: jax.Array,
    numbers: SamplingNumbers,
    distance: jax.Array,
) -> tuple[jax.Array, jax.Array, Progress, PyTree]:
    """Up to `limit` (at most `DECODE_BLOCK`) further tokens of every row that isn't done.

    Returns:
        The tokens and the depths each took, [B, DECODE_BLOCK] int32, -1 where a row got none; then where the rows are.
    """
    empty = jnp.full((progress.last.shape[0], DECODE_BLOCK), -1, jnp.int32)

    def body(carry):
        i, tokens, depths, progress, slots = carry
        last, positions = progress.last[:, None], progress.positions[:, None]
        if kinds.early_exit:
            hidden, slots, taken = until_settled(model, last, positions, slots, distance)
        else:
            hidden, slots = all_depths(model, last, positions, slots)
            taken = jnp.full_like(progress.last, model.total_depth)
        logits = model.logits(hidden)[:, 0]
        after = progress.positions + 1
        token = choose(logits, numbers, progress.rows, after, kinds.draws, kinds.ranks)
        token = jnp.where(progress.done, progress.last, token)
        tokens = tokens.at[:, i].set(jnp.where(progress.done, -1, token))
        depths = depths.at[:, i].set(jnp.where(progress.done, -1, taken))
        positions = jnp.where(progress.done, progress.positions, after)
        done = progress.done | jnp.isin(token, stop_ids) | (positions >= progress.limits)
        return i + 1, tokens, depths, progress._replace(last=token, positions=positions, done=done), slots

    def unfinished(carry):
        return (carry[0] < limit) & ~jnp.all(carry[3].done)

    _, tokens, depths, progress, slots = jax.lax.while_loop(
        unfinished, body, (jnp.int32(0), empty, empty, progress, slots)
    )
    return tokens, depths, progress, slots


def score(
    kinds: Kinds, model: FoldedModel, tokens: jax.Array, targets: jax.Array, start: jax.Array, slots: PyTree
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Log-probability of each target [B, P] after its position, and whether it is the likeliest token.

    Args:
        tokens, targets: [B, P] int32, at positions start .. start + P - 1 of every row.
        start: scalar int32.
    """
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, slots = all_depths(model, tokens, positions, slots)
    rows = max(1, LOGITS // (tokens.shape[0] * model.config.vocab_size))  # positions whose logits fit

    def of_position(both):
        hidden, target = both
        logits = model.logits(hidden)  # [B, V]
        picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    by_position = jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(targets, 0, 1)
    logprobs, greedy = jax.lax.map(of_position, by_position, batch_size=min(rows, tokens.shape[1]))
    return logprobs.T, greedy.T, slots


class Programs:
    """The programs, jitted; the first argument of each is its `Kinds`. Use `programs_for`.

    Args:
        sharding: None for one device.
    """

    def __init__(self, sharding: ModelSharding | None):
        model = rows = slots = same = PartitionSpec()
        if sharding is not None:
            model, rows, slots = sharding.model, sharding.rows, sharding.slots
        self._sharding = sharding
        self.prefill = self._jit(prefill, (model, rows, rows, rows, slots, rows), (rows, slots), donate=(5, 6))
        self.first = self._jit(first, (model, rows, rows, rows, rows, same, same), rows)
        specs = (model, rows, slots, same, same, same, same)
        self.decode = self._jit(decode, specs, (rows, rows, rows, slots), donate=(3,))
        self.score = self._jit(score, (model, rows, rows, same, slots), (rows, rows, slots), donate=(5,))
        self.empty_slots: Any = jax.jit(
            FoldedModel.empty_slots,
            static_argnums=(1, 2),
            out_shardings=None if sharding is None else NamedSharding(sharding.mesh, slots),
        )

    def _jit(self, function: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...] = ()) -> Any:
        def spread(kinds: Kinds, *arguments: Any) -> Any:
            body = functools.partial(function, kinds)
            if self._sharding is None:
                return body(*arguments)
            mesh = self._sharding.mesh
            return jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)(*arguments)

        return jax.jit(spread, static_argnums=0, donate_argnums=donate)


@functools.cache
def programs_for(sharding: ModelSharding | None) -> Programs:
    """The programs of a sharding; the same ones every time, so that nothing is compiled twice."""
    return Programs(sharding)
