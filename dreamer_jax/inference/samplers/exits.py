"""When a position of a diffusion-forcing wavefront has settled; Geiping et al. (2025b), section 3.5, and their code.

Each rule says so of every position by itself; which of those leave is the sampler's business (`settled`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.samplers.wavefront import Look

Exit = Literal["latent-diff", "latent-acceleration", "token-stability", "fixed"]


class Rule(NamedTuple):
    """One of them.

    Attributes:
        start: (B, W, h) -> what it keeps from one iteration to the next, arrays [B, W, ...] or [B]. What stands there
            for a position that has just entered has no meaning.
        check: (look, what it kept, threshold, L) -> [B, W] bool, and what it keeps.
    """

    start: Callable[[tuple[int, ...]], Any]
    check: Callable[[Look, Any, jax.Array, int], tuple[jax.Array, Any]]


def _latent_difference(look: Look, memory, threshold, depth):
    """|z_t - z_{t-1}| / |z_t| < epsilon (Eq. 3); t counts iterations, and z_0 is what a position starts from."""
    return CRITERIA["latent-diff"].compare(look.before, look.now)[0] < threshold, memory


def _latent_acceleration(look: Look, velocity, threshold, depth):
    """|(z_t - z_{t-1}) - (z_{t-1} - z_{t-2})| / |z_t| < epsilon, from the second iteration of a position on."""
    now = look.now - look.before
    acceleration = jnp.linalg.norm(now - velocity, axis=-1) / jnp.linalg.norm(look.now, axis=-1)
    return ~look.fresh & (acceleration < threshold), now


def _token_stability(look: Look, memory, threshold, depth):
    """The prediction behind a position has stayed the same in more than so many iterations in a row."""
    predicted, times = memory
    times = jnp.where(~look.fresh & (look.predicted == predicted), times + 1, 0)
    return times > threshold, (look.predicted, times)


def _fixed(look: Look, memory, threshold, depth):
    """All recurrences (Algorithm 1, line 14)."""
    return look.counts >= depth, memory


def nothing(shape: tuple[int, ...]) -> tuple[()]:
    """What a rule keeps that keeps nothing."""
    return ()


EXITS: dict[Exit, Rule] = {
    "latent-diff": Rule(nothing, _latent_difference),
    "latent-acceleration": Rule(lambda shape: jnp.zeros(shape, jnp.float32), _latent_acceleration),
    "token-stability": Rule(lambda shape: (jnp.zeros(shape[:2], jnp.int32),) * 2, _token_stability),
    "fixed": Rule(nothing, _fixed),
}
