"""Diffusion forcing as the published code does it where that differs from the paper (`official_quirks`).

`generate_diffusion_style` of seal-rg/recurrent-pretraining, commit 59e0b69. A token becomes final when the state of its
own position has settled, and that state stays in flight: so `leaving` is the number of positions in front of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.samplers.exits import Rule, nothing
from dreamer_jax.inference.samplers.wavefront import Look, Wave
from dreamer_jax.inference.sampling import by_row

if TYPE_CHECKING:
    from dreamer_jax.inference.samplers.diffusion_forcing import DiffusionForcing

MOST_ITERATIONS = 4096
"""After so many a text ends, whatever it has come to (`max_diffusion_steps`)."""


def _misaligned_difference(look: Look, shift: jax.Array, threshold, depth):
    """|z_t - z_{t-1}| / |z_t| < epsilon, where z_{t-1} is that of so many positions further on as have left since then:
    states are cut off twice. In the first iteration of all there is nothing to compare with."""
    lanes = jnp.arange(look.now.shape[1]) + shift[:, None]
    rows, there = jnp.arange(len(shift))[:, None], lanes < jnp.sum(look.active, axis=1)[:, None]
    before = look.before[rows, jnp.minimum(lanes, lanes.shape[1] - 1)]
    return there & (CRITERIA["latent-diff"].compare(before, look.now)[0] < threshold), shift


def _token_stability(look: Look, times: jax.Array, threshold, depth):
    """The own token of a position has stayed the same in more than so many iterations, not only of the last ones."""
    times = jnp.where(look.fresh, 0, times) + ~look.changed
    return times > threshold, times


RULES: dict[str, Rule] = {
    "latent-diff": Rule(lambda shape: jnp.full(shape[0], shape[1], jnp.int32), _misaligned_difference),
    "token-stability": Rule(lambda shape: jnp.zeros(shape[:2], jnp.int32), _token_stability),
    "fixed": Rule(nothing, lambda look, memory, threshold, depth: (look.active, memory)),
}


def leaving(sampler: DiffusionForcing, look: Look, wave: Wave, numbers: Any, depth: int) -> tuple[jax.Array, Any]:
    """How many of the oldest positions leave, [B], and what the exit keeps of this iteration.

    fixed: `headway`, once more than L // r' iterations are over. The others: as many as stand before the last position
    that has settled, whether those between have settled or not.
    """
    done, memory = RULES[sampler.exit].check(look, wave.memory, by_row(numbers.threshold, look.counts), depth)
    if sampler.exit == "fixed":
        late = wave.iterations > depth // numbers.inner
        return jnp.where(late, jnp.minimum(sampler.headway, wave.length), 0), memory
    count = jnp.max(jnp.where(done & look.active, jnp.arange(done.shape[1]), 0), axis=1)
    return count, count if sampler.exit == "latent-diff" else memory


def check(sampler: DiffusionForcing) -> None:
    """Refuse settings that the published code can't be used with.

    Raises:
        UserError: there are some.
    """
    problem = None
    if sampler.exit == "latent-acceleration":
        problem = "--sampler.exit latent-acceleration has two published forms that misalign states; take another exit"
    elif not sampler.prefill:
        problem = "without prefill the published code lets tokens of the prompt change; leave --sampler.prefill true"
    elif sampler.wavefront < 2:
        problem = "a wavefront of 1 never comes to an end in the published code; take --sampler.wavefront 2 or more"
    if problem is not None:
        raise UserError(f"sampler.official_quirks: {problem}")


def lanes_of_fixed(sampler: DiffusionForcing, depth: int) -> int:
    """Lanes that the exit `fixed` takes: a position has L // r' + 2 iterations, and as many new ones as leave have to
    be there before those leave.

    Raises:
        UserError: the wavefront has fewer, where the published code fails.
    """
    lanes = 1 + (depth // sampler.inner_recurrences + 2) * sampler.headway
    if sampler.wavefront < lanes:
        raise UserError(
            f"sampler.official_quirks: the exit fixed of the published code fails with a wavefront of "
            f"{sampler.wavefront}; take --sampler.wavefront {lanes} or more"
        )
    return lanes
