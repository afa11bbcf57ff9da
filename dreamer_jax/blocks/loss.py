"""Next-token cross-entropy in float32, in chunks of tokens: the logits of a whole batch never exist at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

CHUNK_ELEMENTS = 1 << 24
"""Logits computed at once, 64 MiB of float32, where that is at least CHUNK_ROWS tokens."""
CHUNK_ROWS = 2048
"""Tokens computed at once for a large vocabulary: the head's gradient is read and written once a chunk."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float = 0.0
) -> jax.Array:
    """Summed cross-entropy of the next token, each weighted if `mask` holds weights.

    The gradient is computed with the loss, chunk by chunk, so that no logits are kept or computed twice.

    Args:
        hidden: [T, h], compute dtype.
        head: [V, h] float32; cast to hidden's dtype, its gradient summed in float32.
        targets: [T] int32.
        mask: [T] bool, the targets that count; or float32, their weights, whose gradient are the losses.
        z_loss: weight of (log Z)^2, Z being the softmax's normaliser (Chowdhery et al., 2022, section 5).

    Returns:
        Scalar float32: the sum over the targets that count.
    """
    weight = head.astype(hidden.dtype)

    def chunk(total, part):
        rows, target, counted = part
        return total + jnp.sum(_losses(_logits(rows, weight), target, z_loss) * counted), None

    return jax.lax.scan(chunk, jnp.float32(0), chunks(head, hidden, targets, mask))[0]


def _forward(hidden, head, targets, mask, z_loss):
    weight, weighted = head.astype(hidden.dtype), jnp.issubdtype(mask.dtype, jnp.floating)

    def chunk(carry, part):
        total, d_head = carry
        rows, target, counted = part
        logits = _logits(rows, weight)
        losses = _losses(logits, target, z_loss)
        total += jnp.sum(losses * counted)
        one_hot = jnp.arange(logits.shape[1]) == target[:, None]
        softmax = jax.nn.softmax(logits)
        if z_loss:
            softmax *= 1 + 2 * z_loss * jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        d_logits = ((softmax - one_hot) * counted[:, None]).astype(rows.dtype)
        d_rows = d_logits @ weight
        d_head += jnp.einsum("tv,th->vh", d_logits, rows, preferred_element_type=jnp.float32)
        return (total, d_head), (d_rows, losses if weighted else None)

    start = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), (d_hidden, losses) = jax.lax.scan(chunk, start, chunks(head, hidden, targets, mask))
    d_mask = None if losses is None else losses.reshape(-1)[: mask.size]
    return total, (d_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]], d_head, d_mask)


def _backward(z_loss, residuals, d_total):
    d_hidden, d_head, d_mask = residuals
    d_mask = None if d_mask is None else d_mask * d_total
    return (d_hidden * d_total.astype(d_hidden.dtype), d_head * d_total, None, d_mask)


cross_entropy.defvjp(_forward, _backward)


def token_losses(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For evaluation: cross-entropy [T] float32 of every target, and whether it is the most likely token [T] bool."""
    weight = head.astype(hidden.dtype)

    def chunk(part):
        rows, target = part
        logits = _logits(rows, weight)
        return _losses(logits, target), jnp.argmax(logits, axis=-1) == target

    losses, correct = jax.lax.map(chunk, chunks(head, hidden, targets))
    return losses.reshape(-1)[: targets.size], correct.reshape(-1)[: targets.size]


def _logits(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("th,vh->tv", rows, weight, preferred_element_type=jnp.float32)


def _losses(logits: jax.Array, targets: jax.Array, z_loss: float = 0.0) -> jax.Array:
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    losses = normaliser - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return losses + z_loss * normaliser**2 if z_loss else losses


def chunks(head: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Each array [T, ...] as [chunks, rows, ...], zero-padded to whole chunks."""
    tokens = arrays[0].shape[0]
    count = -(-tokens // max(CHUNK_ROWS, CHUNK_ELEMENTS // head.shape[0]))
    rows = -(-tokens // count)
    padding = count * rows - tokens
    padded = (jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))) for a in arrays)
    return tuple(a.reshape(count, rows, *a.shape[1:]) for a in padded)
