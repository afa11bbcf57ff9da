"""Diffusion forcing: positions are refined together, each from a guess of its token that may still change.

Geiping et al. (2025b), "Efficient parallel samplers for recurrent-depth models", Algorithms 1 and 2. An iteration

- embeds the tokens of all positions in flight anew and mixes the result with what they got before (Eq. 1);
- mixes noise into their states (Eq. 2), and takes them r' recurrences further;
- reads a prediction off every state, which is the next position's token from now on;
- lets the oldest ones go whose states have settled (Eq. 3): the tokens behind them are final;
- lets new positions enter behind the newest.

Unlike in the lossless wavefront a position whose token changes isn't thrown away: the input that is injected in every
recurrence pulls its state after it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.memory import NOWHERE
from dreamer_jax.inference.model import FoldedModel, PyTree
from dreamer_jax.inference.samplers import published
from dreamer_jax.inference.samplers.contract import (
    DECODE_BLOCK,
    Asked,
    Block,
    Carried,
    Choosing,
    Chosen,
    Progress,
    Sampler,
    of_rows,
)
from dreamer_jax.inference.samplers.exits import EXITS, Exit
from dreamer_jax.inference.samplers.wavefront import Wave, advanced, begun, of_lanes, refined
from dreamer_jax.inference.sampling import LARGEST, by_row

THRESHOLD = 0.03
"""epsilon of the paper's section 5, and of its code."""


class Numbers(NamedTuple):
    """The settings that are run-time numbers, scalars; threshold, momentum and noise may be [B], one for each row. See
    `DiffusionForcing`."""

    inner: Any
    threshold: Any
    momentum: Any
    noise: Any
    init_scale: Any


@dataclass(frozen=True)
class DiffusionForcing(Sampler):
    """A wavefront whose positions are refined together, tokens and all, until the oldest ones have settled. The text is
    near that of all depths for every token, for a fraction of the steps."""

    name: ClassVar[str] = "diffusion-forcing"
    early: ClassVar[bool] = True

    inner_recurrences: int = 4
    """r': recurrences between two looks at the predictions."""
    wavefront: int = 128
    """Most positions in flight at once."""
    headway: int = 1
    """Positions that enter after an iteration; the tokens of those behind the first are drawn at random."""
    exit: Exit = "latent-diff"
    """When a position leaves: its state has changed by less than the threshold in an iteration (latent-diff); that
    change has changed by less (latent-acceleration); its prediction has stayed the same in more iterations in a row
    (token-stability); or it has had all recurrences (fixed). An oldest one leaves after L recurrences in any case."""
    threshold: float = 0.0
    """Of the exit. 0: 0.03 of a state's norm, or for token-stability as many iterations as L recurrences take."""
    momentum: float = 0.1
    """eta: share of the input that a position got before in the one that it gets now."""
    noise: float = 0.0
    """beta: share of a random state that is mixed into one that has had no recurrences yet."""
    noise_schedule: Literal["linear", "harmonic"] = "linear"
    """How that share falls with the s recurrences that a position has had: 1 - s / L (the paper), or 1 / (1 + s) (its
    code)."""
    init_scale: float = 1.0
    """alpha: factor on the random states of the wavefront."""
    continuous: bool = False
    """Positions enter with the states of the newest ones in place of random states."""
    prefill: bool = True
    """Whether a prompt first goes through all depths. Otherwise it is the begin of the wavefront."""
    official_quirks: bool = False
    """Do as the published code does where that differs from the paper, for comparison (docs/samplers.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("inner_recurrences", "wavefront", "headway"):
            self._require(getattr(self, key) >= 1, key, "must be 1 or more")
        self._require(0 <= self.threshold <= LARGEST, "threshold", f"must be from 0 (the exit's own) to {LARGEST:g}")
        self._require(0 <= self.init_scale <= LARGEST, "init_scale", f"must be from 0 to {LARGEST:g}")
        self._require(0 <= self.momentum < 1, "momentum", "must be 0 (none) or more, and less than 1")
        self._require(0 <= self.noise <= 1, "noise", "must be from 0 (none) to 1")
        if self.official_quirks:
            published.check(self)

    def refusal(self, family) -> str | None:
        """Section 3.2 of the paper: the input is injected, states can be decoded at any depth, caches are shared."""
        flags, its = family.flags, family.headline()
        if flags.halts:
            return f"tokens of this model ({its}) stop by the rule it was trained with; take the sampler static"
        if not flags.injects_inputs:
            return f"a state has to follow its token, but the steps of this model ({its}) get no input beside the state"
        if not flags.shares_caches or family.flight(1, 1, 1) is not None:
            return f"keys of one depth have to stand in for those of another, and in this model ({its}) they can't"
        if not flags.decodable:
            return f"guesses are read off at any depth, and this model ({its}) was trained to be read at one depth only"
        return None

    def at(self, depth: int) -> DiffusionForcing:
        """With the exit's threshold, and no more lanes than can be in flight."""
        self._require(self.inner_recurrences <= depth, "inner_recurrences", f"must be at most the depth, {depth}")
        own = depth // self.inner_recurrences if self.exit == "token-stability" else THRESHOLD
        chosen = dataclasses.replace(self, threshold=self.threshold or own)
        if self.exit != "fixed" or not self.prefill:
            return chosen
        alone = -(-depth // self.inner_recurrences) * self.headway
        lanes = published.lanes_of_fixed(self, depth) if self.official_quirks else alone
        return dataclasses.replace(chosen, wavefront=min(self.wavefront, lanes))

    @property
    def prefills(self) -> bool:
        """As it is set."""
        return self.prefill

    @property
    def program(self) -> DiffusionForcing:
        """What isn't a number; of the noise, whether there is any."""
        noise = 1.0 if self.noise else 0.0
        numbers = {"inner_recurrences": 1, "threshold": 0.0, "momentum": 0.0, "init_scale": 1.0}
        return dataclasses.replace(self, noise=noise, **numbers)

    def numbers(self) -> Numbers:
        """The others."""
        wide = self.momentum, self.noise, self.init_scale
        return Numbers(np.int32(self.inner_recurrences), np.float32(self.threshold), *wide)

    def carry(self, model: FoldedModel, rows: int) -> Carried:
        """Empty lanes."""
        shape = rows, self.wavefront
        places, none = jnp.zeros(shape, jnp.int32), jnp.zeros(rows, jnp.int32)
        flight, _ = jax.eval_shape(lambda: model.enter(places, places, model.empty_slots(rows, 1)))
        state, inputs = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (flight.state, flight.inputs))
        stream = jax.eval_shape(lambda: model.family.stream(flight.state))
        rule = published.RULES[self.exit] if self.official_quirks else EXITS[self.exit]
        memory = rule.start(stream.shape)
        return Carried(Wave(places, places, none, none, none, none, none > 0, state, inputs, memory, ()))

    def with_prompts(self, carried: Carried, tokens: jax.Array) -> Carried:
        """With the prompts [B, N] that are to be part of the wavefront."""
        return carried._replace(by_row=carried.by_row._replace(prompts=tokens))

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """One iteration of all rows after another."""

        def body(block: Block) -> Block:
            return iteration(self, choosing, model, block, asked)

        counted = model.total_depth if self.official_quirks else 0
        carried = carried._replace(by_row=begun(carried.by_row, progress, counted))
        start = Block.empty(choosing, progress, slots, carried, DECODE_BLOCK + self.wavefront - 1)
        return asked.in_rounds(model, body, start)


def iteration(sampler: DiffusionForcing, choosing: Choosing, model: FoldedModel, block: Block, asked: Asked) -> Block:
    """Algorithm 2, lines 5 to 25, of the rows that want tokens."""
    going, numbers = block.wanting(asked.limit), asked.settings
    wave: Wave = block.carried.by_row
    look, slots = refined(sampler, choosing, model, block, going, asked)
    if sampler.official_quirks:
        leaving, memory = published.leaving(sampler, look, wave, numbers, model.total_depth)
    else:
        leaving, memory = settled(sampler.exit, look, wave, numbers, model.total_depth)
        slots = refilled(model, look.state, look.counts, slots, wave.first, going * leaving)
    after = advanced(
        sampler, wave._replace(memory=memory), look, leaving, block.progress, asked, model.config.vocab_size
    )
    after = jax.tree.map(lambda new, old: jnp.where(of_rows(going, old), new, old).astype(old.dtype), after, wave)
    known = block.progress.positions - wave.first  # positions whose successors are part of a prompt
    lanes = jnp.minimum(jnp.arange(look.tokens.shape[1]) + known[:, None], look.tokens.shape[1] - 1)
    new, depths = jax.tree.map(
        lambda leaf: jnp.take_along_axis(leaf, of_lanes(lanes, leaf), axis=1),
        (Chosen(look.predicted, look.logprobs), look.counts),
    )
    work = numbers.inner * jnp.sum(look.active, axis=1)
    block = block._replace(
        carried=block.carried._replace(by_row=after),
        slots=slots,
        tally=block.tally.plus(going, numbers.inner, work),
    ).grown(new, going * jnp.maximum(leaving - known, 0), depths, asked)
    if sampler.official_quirks:
        endless = after.iterations > published.MOST_ITERATIONS
        block = block._replace(progress=block.progress._replace(done=block.progress.done | endless))
    return block


def settled(exit: Exit, look: Any, wave: Wave, numbers: Numbers, depth: int) -> tuple[jax.Array, PyTree]:
    """How many of the oldest positions leave, [B]: the k* of Eq. 3; and what the exit keeps of this iteration.

    A position whose token has just changed stays: neither its state nor its keys know the new one. The oldest one,
    whose token is final, leaves after L recurrences, which is all that it would get alone.
    """
    done, memory = EXITS[exit].check(look, wave.memory, by_row(numbers.threshold, look.counts), depth)
    oldest = jnp.arange(done.shape[1]) == 0
    done |= oldest & (wave.alone + numbers.inner >= depth)[:, None]
    return jnp.sum(jnp.cumprod(done & look.active & ~look.changed, axis=1), axis=1, dtype=jnp.int32), memory


def refilled(
    model: FoldedModel, state: PyTree, counts: jax.Array, slots: PyTree, first: jax.Array, leaving: jax.Array
) -> PyTree:
    """The slots with what stands for recurrences that positions which leave haven't taken; the family's rule."""

    def one(lane: jax.Array, slots: PyTree) -> PyTree:
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, lane, 1, axis=1), state)
        last = jnp.minimum(jax.lax.dynamic_index_in_dim(counts, lane, 1, keepdims=False), model.total_depth) - 1
        places = jnp.where(lane < leaving, first + lane, NOWHERE)
        return model.family.refill(model.params, own, slots, last, places)

    return jax.lax.fori_loop(0, jnp.max(leaving), one, slots)
