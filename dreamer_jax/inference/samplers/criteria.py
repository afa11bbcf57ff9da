"""When a token may stop going deeper: the criteria of Geiping et al. (2025), section 6.1, and of their code.

Each compares a reading after a depth with that of the check before. Those of the output (`reads_logits`) need the
readout and the head at every check. The thresholds are those of the released code, `seal-rg/recurrent-pretraining`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Name = Literal["latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability"]
MINOR = 0.1
"""min-p KL: a token below this fraction of the likeliest one counts as one of all."""


class Criterion(NamedTuple):
    """One of them.

    Attributes:
        threshold: of the released code.
        start: the first stream [B, h] and V -> what the first check compares with.
        compare: (what the last check left, stream [B, h] or logits [B, V], float32) -> value [B], what this one leaves.
        reads_logits: whether it gets logits.
        rises: whether a token stops when the value has reached the threshold; otherwise when it is below.
    """

    threshold: float
    start: Callable[[jax.Array, int], Any]
    compare: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    reads_logits: bool = True
    rises: bool = False

    def stops(self, value: jax.Array, threshold: jax.Array) -> jax.Array:
        """[B] bool."""
        return value >= threshold if self.rises else value < threshold


def _latent_difference(before, stream):
    """|s_t - s_{t-1}| / |s_t|."""
    return jnp.linalg.norm(stream - before, axis=-1) / jnp.linalg.norm(stream, axis=-1), stream


def _cosine(before, stream):
    """1 - cos(s_t, s_{t-1})."""
    norms = jnp.linalg.norm(stream, axis=-1) * jnp.linalg.norm(before, axis=-1)
    return 1 - jnp.sum(stream * before, axis=-1) / norms, stream


def _entropy_difference(before, logits):
    """|H_t - H_{t-1}| of the prediction, in nats."""
    logs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    return jnp.abs(entropy - before), entropy


def _divergence(before, logs):
    """KL(p_{t-1} || p_t)."""
    return jnp.sum(jnp.exp(before) * (before - logs), axis=-1), logs


def _kl(before, logits):
    return _divergence(before, jax.nn.log_softmax(logits))


def _min_p_kl(before, logits):
    """The same of the larger probabilities: each that is below `MINOR` of the largest becomes 1 / V, and what this
    makes of the sum is divided out."""
    p = jax.nn.softmax(logits)
    p = jnp.where(p < MINOR * jnp.max(p, axis=-1, keepdims=True), 1 / p.shape[-1], p)
    return _divergence(before, jnp.log(p / jnp.sum(p, axis=-1, keepdims=True)))


def _stability(before, logits):
    """How many checks in a row the likeliest token has stayed the same."""
    token, count = before
    now = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    count = jnp.where(now == token, count + 1, 0)
    return count.astype(jnp.float32), (now, count)


def _uniform(stream: jax.Array, vocabulary: int) -> jax.Array:
    return jnp.full((stream.shape[0], vocabulary), -jnp.log(jnp.float32(vocabulary)))


def _no_token(stream: jax.Array, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    none = jnp.zeros(stream.shape[0], jnp.int32)
    return none - 1, none


CRITERIA: dict[Name, Criterion] = {
    "latent-diff": Criterion(0.03, lambda stream, _: stream, _latent_difference, reads_logits=False),
    "cosine": Criterion(1e-3, lambda stream, _: stream, _cosine, reads_logits=False),
    "entropy-diff": Criterion(1e-3, lambda stream, _: jnp.full(stream.shape[0], 100.0), _entropy_difference),
    "kl": Criterion(1e-3, _uniform, _kl),
    "minp-kl": Criterion(1e-5, _uniform, _min_p_kl),
    "argmax-stability": Criterion(5, _no_token, _stability, rises=True),
}
