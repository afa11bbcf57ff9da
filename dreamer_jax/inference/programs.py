"""The jitted programs of the engine: prefill, blocks of decoding, scores. Compiled once for each bucket of shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dreamer_jax.inference.caches import Caches, State, fill_deeper
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.placement import Placement
from dreamer_jax.inference.sampling import SamplingNumbers, choose

BLOCK = 32
"""Tokens a row gets at most in one call of `decode`."""
LOGITS = 1 << 24
"""Logits that are held at once when scoring."""


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


def all_depths(model: FoldedModel, state: State, positions: jax.Array, caches: Caches) -> tuple[State, Caches]:
    """Positions [B, P] from the embedding through every depth."""

    def body(l, carry):
        return model.step(carry[0], positions, l, carry[1])

    return jax.lax.fori_loop(0, model.total_depth, body, (state, caches))


def until_settled(
    model: FoldedModel, state: State, positions: jax.Array, caches: Caches, distance: jax.Array
) -> tuple[State, Caches, jax.Array]:
    """Positions [B, 1] through the depths until their hidden state stops changing.

    A row stops after the depth at which |x' - x| / |x'| < `distance`; its keys and values of that depth stand for
    those of the deeper ones. The batch goes on until all rows have stopped.

    Returns:
        State, caches, and how many depths each row took, [B] int32.
    """

    def body(carry):
        l, state, caches, running, depths = carry
        new, caches = model.step(state, positions, l, caches)
        old_hidden, new_hidden = (s.hidden[:, 0].astype(jnp.float32) for s in (state, new))
        moved = jnp.linalg.norm(new_hidden - old_hidden, axis=-1) / jnp.linalg.norm(new_hidden, axis=-1)
        hidden = jnp.where(running[:, None, None], new.hidden, state.hidden)
        depths = depths + running
        return l + 1, new._replace(hidden=hidden), caches, running & (moved >= distance), depths

    def unfinished(carry):
        return (carry[0] < model.total_depth) & jnp.any(carry[3])

    rows = positions.shape[0]
    start = (jnp.int32(0), state, caches, jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32))
    _, state, caches, _, depths = jax.lax.while_loop(unfinished, body, start)
    return state, fill_deeper(caches, depths - 1, positions[:, 0]), depths


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
    caches: Caches,
    hidden: jax.Array,
) -> tuple[jax.Array, Caches]:
    """One chunk of the prompts.

    Args:
        tokens: [B, P] int32; row b's are at positions start[b] .. start[b] + P - 1. What lies at or after
            lengths[b] is padding, and its slots are written again before anything looks at them.
        start, lengths: [B] int32.
        hidden: [B, h], the state of each prompt's last position as far as it has come.

    Returns:
        `hidden` and the caches.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    state, caches = all_depths(model, model.embed(tokens), positions, caches)
    last = lengths - 1 - start
    own = jnp.take_along_axis(state.hidden, jnp.clip(last, 0, tokens.shape[1] - 1)[:, None, None], axis=1)[:, 0]
    here = (last >= 0) & (last < tokens.shape[1])
    return jnp.where(here[:, None], own, hidden), caches


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
    """The first token after prompts of these lengths [B], from the states of their last positions [B, h]."""
    logits = model.readout(State(hidden[:, None], None, None))[:, 0]
    token = choose(logits, numbers, rows, lengths, kinds.draws, kinds.ranks)
    done = jnp.isin(token, stop_ids) | (lengths >= limits)
    return Progress(token, lengths, done, rows, limits)


def decode(
    kinds: Kinds,
    model: FoldedModel,
    progress: Progress,
    caches: Caches,
    limit: jax.Array,
    stop_ids: jax.Array,
    numbers: SamplingNumbers,
    distance: jax.Array,
) -> tuple[jax.Array, jax.Array, Progress, Caches]:
    """Up to `limit` (at most `BLOCK`) further tokens of every row that isn't done.

    Returns:
        The tokens and the depths each took, [B, BLOCK] int32, -1 where a row got none; then where the rows are.
    """
    empty = jnp.full((progress.last.shape[0], BLOCK), -1, jnp.int32)

    def body(carry):
        i, tokens, depths, progress, caches = carry
        state, positions = model.embed(progress.last[:, None]), progress.positions[:, None]
        if kinds.early_exit:
            state, caches, taken = until_settled(model, state, positions, caches, distance)
        else:
            state, caches = all_depths(model, state, positions, caches)
            taken = jnp.full_like(progress.last, model.total_depth)
        logits = model.readout(state)[:, 0]
        after = progress.positions + 1
        token = choose(logits, numbers, progress.rows, after, kinds.draws, kinds.ranks)
        token = jnp.where(progress.done, progress.last, token)
        tokens = tokens.at[:, i].set(jnp.where(progress.done, -1, token))
        depths = depths.at[:, i].set(jnp.where(progress.done, -1, taken))
        positions = jnp.where(progress.done, progress.positions, after)
        done = progress.done | jnp.isin(token, stop_ids) | (positions >= progress.limits)
        return i + 1, tokens, depths, progress._replace(last=token, positions=positions, done=done), caches

    def unfinished(carry):
        return (carry[0] < limit) & ~jnp.all(carry[3].done)

    _, tokens, depths, progress, caches = jax.lax.while_loop(
        unfinished, body, (jnp.int32(0), empty, empty, progress, caches)
    )
    return tokens, depths, progress, caches


def score(
    kinds: Kinds, model: FoldedModel, tokens: jax.Array, targets: jax.Array, start: jax.Array, caches: Caches
) -> tuple[jax.Array, jax.Array, Caches]:
    """Log-probability of each target [B, P] after its position, and whether it is the likeliest token.

    Args:
        tokens, targets: [B, P] int32, at positions start .. start + P - 1 of every row.
        start: scalar int32.
    """
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    state, caches = all_depths(model, model.embed(tokens), positions, caches)
    rows = max(1, LOGITS // (tokens.shape[0] * model.config.vocab_size))  # positions whose logits fit

    def of_position(both):
        hidden, target = both
        logits = model.readout(State(hidden[:, None], None, None))[:, 0]  # [B, V]
        picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    by_position = jnp.swapaxes(state.hidden, 0, 1), jnp.swapaxes(targets, 0, 1)
    logprobs, greedy = jax.lax.map(of_position, by_position, batch_size=min(rows, tokens.shape[1]))
    return logprobs.T, greedy.T, caches


class Programs:
    """The programs, jitted; the first argument of each is its `Kinds`. Use `programs_for`.

    Args:
        placement: None for one device.
    """

    def __init__(self, placement: Placement | None):
        model = rows = caches = same = PartitionSpec()
        if placement is not None:
            model, rows, caches = placement.model, placement.rows, placement.caches
        self._placement = placement
        self.prefill = self._jit(prefill, (model, rows, rows, rows, caches, rows), (rows, caches), donate=(5, 6))
        self.first = self._jit(first, (model, rows, rows, rows, rows, same, same), rows)
        specs = (model, rows, caches, same, same, same, same)
        self.decode = self._jit(decode, specs, (rows, rows, rows, caches), donate=(3,))
        self.score = self._jit(score, (model, rows, rows, same, caches), (rows, rows, caches), donate=(5,))
        self.empty_caches: Any = jax.jit(
            FoldedModel.empty_caches,
            static_argnums=(1, 2),
            out_shardings=None if placement is None else NamedSharding(placement.mesh, caches),
        )

    def _jit(self, function: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...] = ()) -> Any:
        def spread(kinds: Kinds, *arguments: Any) -> Any:
            body = functools.partial(function, kinds)
            if self._placement is None:
                return body(*arguments)
            mesh = self._placement.mesh
            return jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)(*arguments)

        return jax.jit(spread, static_argnums=0, donate_argnums=donate)


@functools.cache
def programs_for(placement: Placement | None) -> Programs:
    """The programs of a placement; the same ones every time, so that nothing is compiled twice."""
    return Programs(placement)
