"""Positions in flight whose tokens may still change: what an iteration of diffusion forcing does with them.

Lane i of a row holds the i-th oldest position, so lanes move up when positions leave. The lanes are an array of one
size; computed are as many as the longest row has in flight, rounded up to one of a few sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import NOWHERE
from dreamer_jax.inference.model import Flight, FoldedModel, PyTree
from dreamer_jax.inference.samplers.contract import Asked, Block, Choosing, Progress
from dreamer_jax.inference.sampling import by_row, draw_keys

if TYPE_CHECKING:
    from dreamer_jax.inference.samplers.diffusion_forcing import DiffusionForcing

FEWEST = 8
"""Lanes that are computed at least, where there are so many; more come by factors of `GROWTH`."""
GROWTH = 4


class Wave(NamedTuple):
    """The positions in flight.

    Attributes:
        tokens: [B, W] int32.
        counts: [B, W] int32, recurrences that each has had.
        first: [B] int32, the oldest position.
        length: [B] int32, how many are in flight; 0 before the first iteration.
        alone: [B] int32, recurrences of the oldest one since it has been that.
        iterations: [B] int32.
        state, inputs: [B, W, ...], what the last iteration left. One that has just entered has none, but if
            `warm`.
        warm: [B] bool, positions that have just entered have got a state from others.
        memory: of the exit, see there; arrays [B] or [B, W, ...].
        prompts: [B, N] int32, where prompts are part of the wavefront, else ().
    """

    tokens: jax.Array
    counts: jax.Array
    first: jax.Array
    length: jax.Array
    alone: jax.Array
    iterations: jax.Array
    warm: jax.Array
    state: PyTree
    inputs: PyTree
    memory: PyTree
    prompts: Any


class Look(NamedTuple):
    """An iteration's positions, [B, W, ...], as exits look at them.

    Attributes:
        active: bool, there is a position in the lane, and its row goes on.
        fresh: bool, this was its first iteration.
        counts: int32, recurrences that it has had by now.
        tokens: int32, what it went in with.
        found: int32, its token from now on.
        predicted: int32, the token behind it.
        logprobs: of `predicted`, see `Chosen`.
        before, now: float32, the residual stream [B, W, h] before noise and recurrences, and after them.
        state, inputs: as of `Wave`.
    """

    active: jax.Array
    fresh: jax.Array
    counts: jax.Array
    tokens: jax.Array
    found: jax.Array
    predicted: jax.Array
    logprobs: Any
    before: jax.Array
    now: jax.Array
    state: PyTree
    inputs: PyTree

    @property
    def changed(self) -> jax.Array:
        """[B, W] bool, positions with another token from now on."""
        return self.tokens != self.found


def begun(wave: Wave, progress: Progress, counted: int) -> Wave:
    """With the first positions in flight, where none is: the newest token; or the prompt, as far as there is room.
    They count as having had so many recurrences."""
    empty, lanes = wave.length == 0, wave.tokens.shape[1]
    if isinstance(wave.prompts, tuple):
        tokens, first, length = progress.last[:, None], progress.positions, 1
    else:
        tokens, first = wave.prompts[:, :lanes], jnp.zeros_like(wave.first)
        length = jnp.minimum(progress.positions + 1, lanes)
    tokens = jnp.pad(tokens, ((0, 0), (0, lanes - tokens.shape[1])))
    return wave._replace(
        tokens=jnp.where(empty[:, None], tokens, wave.tokens),
        counts=jnp.where(empty[:, None], counted, wave.counts),
        first=jnp.where(empty, first, wave.first),
        length=jnp.where(empty, length, wave.length),
    )


def refined(
    sampler: DiffusionForcing, choosing: Choosing, model: FoldedModel, block: Block, going: jax.Array, asked: Asked
) -> tuple[Look, PyTree]:
    """All positions in flight r' recurrences further; and the slots."""
    wave: Wave = block.carried.by_row
    lanes = wave.tokens.shape[1]
    sizes = [size for n in range(4) if (size := FEWEST * GROWTH**n) < lanes] + [lanes]
    active = (jnp.arange(lanes) < wave.length[:, None]) & going[:, None]
    longest = jnp.max(jnp.sum(active, axis=1))

    def of_size(size: int):
        def compute(slots: PyTree):
            first = wave.tokens, wave.counts, wave.state, wave.inputs
            tokens, counts, state, inputs = jax.tree.map(lambda leaf: leaf[:, :size], first)
            cut = wave._replace(tokens=tokens, counts=counts, state=state, inputs=inputs)
            found, slots = _recurred(sampler, choosing, model, cut, block.progress, active[:, :size], slots, asked)
            return jax.tree.map(lambda leaf: _padded(leaf, lanes), found), slots

        return compute

    which = jnp.sum(longest > jnp.asarray(sizes))
    found, slots = jax.lax.switch(which, [of_size(size) for size in sizes], block.slots)
    state, inputs, before, (predicted, logprobs) = found
    places = wave.first[:, None] + jnp.arange(lanes)
    known = places <= block.progress.positions[:, None]
    look = Look(
        active,
        _fresh(wave),
        wave.counts + asked.settings.inner,
        wave.tokens,
        jnp.where(known, wave.tokens, jnp.roll(predicted, 1, axis=1)),
        predicted,
        logprobs,
        before,
        model.family.stream(state).astype(jnp.float32),
        state,
        inputs,
    )
    return look, slots


def _fresh(wave: Wave) -> jax.Array:
    return (wave.counts == 0) | (wave.iterations == 0)[:, None]


def _recurred(
    sampler: DiffusionForcing,
    choosing: Choosing,
    model: FoldedModel,
    wave: Wave,
    progress: Progress,
    active: jax.Array,
    slots: PyTree,
    asked: Asked,
) -> tuple[Any, PyTree]:
    """Lines 5 to 12 of Algorithm 2 for the first lanes: states, inputs, streams before and predictions; the slots."""
    numbers, counts = asked.settings, wave.counts
    places = wave.first[:, None] + jnp.arange(counts.shape[1])
    written = jnp.where(active, places, NOWHERE)
    entered, slots = model.enter(wave.tokens, written, slots, numbers.init_scale)
    state = _chosen(_fresh(wave) & ~wave.warm[:, None], entered.state, wave.state)
    inputs = mixed_inputs(sampler.official_quirks, entered.inputs, numbers.momentum, wave)
    before = model.family.stream(state).astype(jnp.float32)
    if sampler.noise:
        keys = _keys(asked, progress, places, 1 + counts)
        noise = model.random_state(inputs, places, keys, numbers.init_scale)
        share = noise_share(sampler.noise_schedule, by_row(numbers.noise, counts), counts, model.total_depth)
        state = jax.tree.map(lambda z, other: mixed(z, other, share), state, noise)

    def recurrence(number: jax.Array, carry: tuple[Flight, PyTree]) -> tuple[Flight, PyTree]:
        # Recurrences beyond the last leave their keys in its place. The published code counts anew in every iteration.
        depths = number if sampler.official_quirks else jnp.minimum(counts + number, model.total_depth - 1)
        return model.step(carry[0], written, depths, carry[1])

    flight = Flight(state, inputs, None)
    flight, slots = jax.lax.fori_loop(0, numbers.inner, recurrence, (flight, slots))
    hidden, slots = model.leave(flight, written, slots)
    logits = model.logits(hidden)
    rows = jnp.broadcast_to(progress.rows[:, None], places.shape).reshape(-1)
    by_lane = asked._replace(sampling=jax.tree.map(lambda each: _repeated(each, counts.shape[1]), asked.sampling))
    flat = by_lane.choose(choosing, logits.reshape(-1, logits.shape[-1]), rows, places.reshape(-1) + 1)
    chosen = jax.tree.map(lambda leaf: leaf.reshape(*places.shape, *leaf.shape[1:]), flat)
    return (flight.state, inputs, before, chosen), slots


def mixed_inputs(quirks: bool, new: PyTree, momentum: jax.Array, wave: Wave) -> PyTree:
    """Eq. 1: e = eta e_prev + (1 - eta) P(y). What enters has no e_prev, so e = P(y); in the published code only the
    first position of all has that, and for the others e = (1 - eta) P(y)."""

    def mix(p: jax.Array, e: jax.Array) -> jax.Array:
        begins = (wave.iterations == 0).reshape(-1, *[1] * (p.ndim - 1))
        instead = jnp.where(begins, p, 0) if quirks else p
        before = jnp.where(of_lanes(_fresh(wave), p), instead, e)
        of_before, of_p = (by_row(share, p).astype(p.dtype) for share in (momentum, 1 - momentum))
        return of_p * p + of_before * before

    return jax.tree.map(mix, new, wave.inputs)


def noise_share(schedule: str, noise: jax.Array, counts: jax.Array, depth: int) -> jax.Array:
    """beta_s [B, W] after s recurrences: beta (1 - s / L), section 3.4; or beta / (1 + s), the published code."""
    return noise * (jnp.maximum(1 - counts / depth, 0) if schedule == "linear" else 1 / (1 + counts))


def mixed(z: jax.Array, noise: jax.Array, share: jax.Array) -> jax.Array:
    """Eq. 2: (1 - beta_s) z + beta_s z_noise, of arrays [B, W, ...]."""
    share = of_lanes(share, z)
    return ((1 - share) * z + share * noise).astype(z.dtype)


def advanced(
    sampler: DiffusionForcing,
    wave: Wave,
    look: Look,
    leaving: jax.Array,
    progress: Progress,
    asked: Asked,
    vocabulary: int,
) -> Wave:
    """The wave after an iteration: so many of the oldest positions leave [B], the others move up, and new ones enter.

    No position enters that would only be of use behind the last token. In the published code the room is that of before
    the others left, and one position more enters: a token is final there when a state behind it has settled.
    """
    quirks, lanes = sampler.official_quirks, jnp.arange(look.tokens.shape[1])
    size, behind = len(lanes), wave.first + wave.length
    left = wave.length - leaving
    room = size - (wave.length if quirks else left)
    useful = progress.limits + quirks - behind
    wanted = jnp.maximum(sampler.headway, progress.positions + 1 - behind)  # the rest of a prompt needs no guesses
    enters = jnp.maximum(jnp.minimum(jnp.minimum(wanted, room), useful), 0)

    rows, source = jnp.arange(len(leaving))[:, None], jnp.minimum(lanes + leaving[:, None], size - 1)

    def moved(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf[rows, source], tree)

    new = lanes >= left[:, None]
    first = wave.first + leaving
    places = first[:, None] + lanes
    last = jnp.take_along_axis(look.predicted, wave.length[:, None] - 1, axis=1)
    entering = jnp.where(lanes == left[:, None], last, fillers(sampler.headway, asked, progress, places, vocabulary))
    if not isinstance(wave.prompts, tuple):
        own = jnp.take_along_axis(wave.prompts, jnp.minimum(places, wave.prompts.shape[1] - 1), axis=1)
        entering = jnp.where(places <= progress.positions[:, None], own, entering)
    state, warm = moved(look.state), jnp.zeros_like(wave.warm)
    if sampler.continuous:  # the newest `headway` of them, one behind the other
        warm = wave.length >= sampler.headway
        newest = (wave.length - sampler.headway)[:, None] + jnp.clip(lanes - left[:, None], 0, sampler.headway - 1)
        copied = jax.tree.map(lambda leaf: leaf[rows, jnp.maximum(newest, 0)], look.state)
        state = _chosen(new, copied, state)
    return wave._replace(
        tokens=jnp.where(new, entering, moved(look.found)),
        counts=jnp.where(new, 0, moved(look.counts)),
        first=first,
        length=left + enters,
        alone=jnp.where(leaving > 0, 0, wave.alone + asked.settings.inner),
        iterations=wave.iterations + 1,
        warm=warm,
        state=state,
        inputs=moved(look.inputs),
        memory=moved(wave.memory),
    )


def fillers(headway: int, asked: Asked, progress: Progress, places: jax.Array, vocabulary: int) -> jax.Array:
    """Random tokens at these places [B, W], for positions that enter without a guess: all but the first of an
    iteration."""
    if headway == 1:
        return jnp.zeros_like(places)
    keys = _keys(asked, progress, places, jnp.zeros_like(places))
    return jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, vocabulary, jnp.int32)))(keys)


def of_lanes(values: jax.Array, like: jax.Array) -> jax.Array:
    """[B, W] that broadcasts against [B, W, ...]."""
    return values.reshape(*values.shape, *[1] * (like.ndim - 2))


def _repeated(numbers: jax.Array, lanes: int) -> jax.Array:
    """[B] -> [B W]; one number for all as it is."""
    return jnp.repeat(numbers, lanes) if numbers.ndim else numbers


def _padded(leaf: jax.Array, lanes: int) -> jax.Array:
    return jnp.pad(leaf, [(0, lanes - size if axis == 1 else 0) for axis, size in enumerate(leaf.shape)])


def _chosen(lanes: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` in these lanes [B, W], else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(of_lanes(lanes, a), a, b), new, old)


def _keys(asked: Asked, progress: Progress, places: jax.Array, numbers: jax.Array) -> jax.Array:
    """Keys [B, W] of seed, row, position and a number: 0 for fillers, above for noise."""
    rows = jnp.broadcast_to(progress.rows[:, None], places.shape)
    return jax.vmap(jax.vmap(jax.random.fold_in))(draw_keys(asked.sampling, rows, places), numbers)
