"""Self-speculative: tokens are drafted with few depths and verified at all depths in one pass over several positions.

A round begins with a row's newest token at position p. k tokens are drafted one after the other with the first d
depths, then positions p .. p + k go through all L depths together. Their logits are those of plain decoding, as far as
the drafts were right; so up to k drafts are kept, and after them one token more comes from the same logits. The pass
writes over what the drafts have left at the first d depths; what it leaves behind the last token that is kept is
written again before anything looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.inference.model import FoldedModel, PyTree, through_depths
from dreamer_jax.inference.samplers.contract import (
    DECODE_BLOCK,
    Asked,
    Block,
    Carried,
    Choosing,
    Chosen,
    Logprobs,
    Progress,
    Sampler,
    needs_depths_apart,
)
from dreamer_jax.inference.sampling import draw_keys, probabilities, unless_broken


class Drafted(NamedTuple):
    """k tokens of every row.

    Attributes:
        tokens: [B, k] int32.
        likelihoods: [B, k, V], the probabilities that each was drawn with; () where nothing was drawn.
    """

    tokens: jax.Array
    likelihoods: Any


LONGEST = 2**16
"""Most tokens of a draft: their steps are counted in 32 bits, also where a model is thousands of depths deep."""


@dataclass(frozen=True)
class Speculative(Sampler):
    """Tokens are drafted with few depths and verified with all of them in one pass: the same text as with all depths
    for every token, or, where tokens are drawn, a text of the same distribution."""

    name: ClassVar[str] = "speculative"
    drafts: ClassVar[bool] = True

    lookahead: int = 4
    """Tokens that are drafted before they are verified."""
    draft_depth: int = 0
    """Depths that a drafted token takes. 0: an eighth of all, at least one."""
    threshold: float = 1.0
    """1: exact. Below 1 a drafted token is kept if it is at least this fraction as likely as the likeliest one, as in
    the published code; the text is another one then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1 <= self.lookahead <= LONGEST, "lookahead", f"must be from 1 to {LONGEST:,}")
        self._require(self.draft_depth >= 0, "draft_depth", "must be 0 (an eighth of all depths) or more")
        self._require(0 < self.threshold <= 1, "threshold", "must be more than 0, and at most 1 (exact)")

    def refusal(self, family) -> str | None:
        """Positions have to come to the same together as one after the other."""
        return needs_depths_apart(family)

    def at(self, depth: int) -> Speculative:
        """With a draft depth below L."""
        draft_depth = self.draft_depth or max(1, depth // 8)
        chosen = Speculative(self.lookahead, draft_depth, self.threshold)
        if depth < 2:
            raise UserError(f"depth {depth}: sampler {self.name} needs 2 or more")
        chosen._require(draft_depth < depth, "draft_depth", f"must be less than the depth of the model, {depth}")
        return chosen

    @property
    def program(self) -> Speculative:
        """How many tokens, and which rule they are kept by."""
        return Speculative(self.lookahead, 1, 1.0 if self.threshold == 1 else 0.5)

    def numbers(self):
        """The others."""
        return np.int32(self.draft_depth), np.float32(self.threshold)

    def decode(self, choosing: Choosing, model, progress: Progress, slots, carried: Carried, asked: Asked) -> Block:
        """Rounds of drafting and verifying."""
        k, (depth, threshold) = self.lookahead, asked.settings
        steps = k * depth + model.total_depth
        work = steps + k * model.total_depth

        def body(block: Block) -> Block:
            progress = block.progress
            drafted, slots = draft(choosing, model, progress, block.slots, asked, k, depth)
            tokens = jnp.concatenate([progress.last[:, None], drafted.tokens], axis=1)
            places = progress.positions[:, None] + jnp.arange(k + 1)
            hidden, slots = through_depths(model, tokens, places, slots)
            logits = model.logits(hidden)  # [B, k + 1, V]
            if self.threshold < 1:
                tokens, kept = by_threshold(choosing, drafted, logits, progress, asked, threshold)
            else:
                verify = by_rejection if choosing.draws else by_equality
                tokens, kept = verify(choosing, drafted, logits, progress, asked)
            going = block.wanting(asked.limit)
            taken = jnp.full_like(kept, model.total_depth)
            logprobs = () if choosing.logprobs is None else Logprobs.of(logits, tokens, choosing.logprobs)
            chosen = Chosen(tokens, logprobs)
            grown = block._replace(slots=slots).grown(chosen, going * (kept + 1), taken, asked)
            stayed = jnp.minimum(kept, grown.counts - block.counts)  # not those behind the row's end
            return grown._replace(tally=block.tally.plus(going, steps, work, k, stayed))

        return asked.in_rounds(model, body, Block.empty(choosing, progress, slots, Carried(), DECODE_BLOCK + k))


def draft(
    choosing: Choosing, model: FoldedModel, progress: Progress, slots, asked: Asked, k: int, depth: jax.Array
) -> tuple[Drafted, PyTree]:
    """k tokens behind each row's newest, one after the other, read off after so many depths; and the slots."""

    def one(carry, number):
        token, slots = carry
        place = progress.positions + number
        hidden, slots = through_depths(model, token[:, None], place[:, None], slots, depth)
        logits = model.logits(hidden)[:, 0]
        token = asked.choose(choosing, logits, progress.rows, place + 1).token
        drawn: Any = probabilities(logits, asked.sampling, choosing.ranks) if choosing.draws else ()
        return (token, slots), (token, drawn)

    (_, slots), by_number = jax.lax.scan(one, (progress.last, slots), jnp.arange(k))
    return Drafted(*jax.tree.map(lambda each: jnp.swapaxes(each, 0, 1), by_number)), slots


# How many drafts are kept: of each rule [B, k + 1] tokens, of which the first [B] + 1 count.


def by_equality(choosing, drafted: Drafted, logits: jax.Array, progress, asked) -> tuple[jax.Array, jax.Array]:
    """Greedy: drafts that are the likeliest tokens at full depth."""
    likeliest = unless_broken(jnp.argmax(logits, axis=-1).astype(jnp.int32), logits)
    return likeliest, leading(drafted.tokens == likeliest[:, :-1])


def by_rejection(
    choosing: Choosing, drafted: Drafted, logits: jax.Array, progress: Progress, asked: Asked
) -> tuple[jax.Array, jax.Array]:
    """Speculative sampling (Leviathan et al., 2023, Algorithm 1): x ~ q is kept with probability min(1, p(x) / q(x)),
    and the token after the last one kept is drawn from max(0, p - q), normed; behind k kept ones from p.

    Keys are those of row and position, so a token is drawn alike whatever else is computed; keeping and drawing again
    each have a key of their own, because the token's own has drawn the draft.
    """
    k = drafted.tokens.shape[1]
    p, q = probabilities(logits, asked.sampling, choosing.ranks), drafted.likelihoods
    places = progress.positions[:, None] + 1 + jnp.arange(k + 1)
    keys = draw_keys(asked.sampling, jnp.broadcast_to(progress.rows[:, None], places.shape), places)
    keeping, again = (jax.vmap(jax.vmap(lambda key, n=n: jax.random.fold_in(key, n)))(keys[:, :k]) for n in (1, 2))
    draws = jax.vmap(jax.vmap(jax.random.uniform))(keeping)
    p_x, q_x = (jnp.take_along_axis(each, drafted.tokens[..., None], axis=2)[..., 0] for each in (p[:, :k], q))
    kept = leading(draws * q_x < p_x)
    left = jnp.maximum(p[:, :k] - q, 0)
    # Where p = q nothing is left and nothing is ever refused, but for rounding.
    left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p[:, :k])
    instead = jax.vmap(jax.vmap(jax.random.categorical))(again, jnp.log(left))
    instead = unless_broken(instead, logits[:, :k])
    bonus = asked.choose(choosing, logits[:, k], progress.rows, places[:, k]).token
    after = jnp.concatenate([instead, bonus[:, None]], axis=1)
    return joined(drafted.tokens, after, kept), kept


def by_threshold(
    choosing: Choosing, drafted: Drafted, logits: jax.Array, progress: Progress, asked: Asked, threshold: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Drafts with p(x) >= threshold max p, p being the plain softmax, as in the published code of Geiping et al."""
    own = jnp.take_along_axis(logits[:, :-1], drafted.tokens[..., None], axis=2)[..., 0]
    kept = leading(own >= jnp.max(logits[:, :-1], axis=-1) + jnp.log(threshold))
    places = progress.positions[:, None] + 1 + jnp.arange(logits.shape[1])
    count = logits.shape[1]
    after = [asked.choose(choosing, logits[:, i], progress.rows, places[:, i]).token for i in range(count)]
    return joined(drafted.tokens, jnp.stack(after, axis=1), kept), kept


def leading(flags: jax.Array) -> jax.Array:
    """[B, k] -> how many are true before the first that isn't, [B] int32."""
    return jnp.sum(jnp.cumprod(flags, axis=1), axis=1, dtype=jnp.int32)


def joined(drafts: jax.Array, after: jax.Array, kept: jax.Array) -> jax.Array:
    """[B, k + 1]: the drafts [B, k] that are kept, and behind them the tokens of full depth [B, k + 1]."""
    first = jnp.arange(after.shape[1]) < kept[:, None]
    return jnp.where(first, jnp.pad(drafts, ((0, 0), (0, 1))), after).astype(jnp.int32)
