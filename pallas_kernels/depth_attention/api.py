"""Typed entry of depth attention, and its custom VJPs."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.depth_attention import pull, tpu, xla
from pallas_kernels.depth_attention.cache import DepthCache, write_slot
from pallas_kernels.depth_attention.layout import head_size
from pallas_kernels.depth_attention.shapes import unsupported
from pallas_kernels.fallback import no_kernels_here, say_once
from pallas_kernels.kept import keep

Tape = Any
"""What `start_tape` makes: of a kernel, or of the XLA form where no kernel takes the shapes."""


def depth_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, tape: Tape | None = None
) -> tuple[jax.Array, DepthCache]:
    """Attention of each token over its own depths 0 .. depth (Algorithm 1); softmax in float32.

    Differentiable in q, k, v and the cache. In the depth scan (model/recurrence.py) a tape is given where there will
    be a backward pass: then the cache gets no gradient, and the tape's gradient is the tape's new value.

    Args:
        q: [T, n, d], depth-encoded.
        k, v: [T, kv, d], the keys (depth-encoded) and values of this depth; head i of q attends with i // (n // kv).
        cache: filled below `depth`.
        depth: scalar int32.
        tape: see `start_tape`.

    Returns:
        [T, n, d], and the cache with slot `depth` filled.
    """
    reason = no_kernels_here() or unsupported(q.shape, q.dtype, cache)
    if reason:
        say_once(f"depth attention without a kernel: {reason}")
        return xla.depth_attention(q, k, v, cache, depth, tape)
    flat = [part.reshape(part.shape[0], -1).astype(q.dtype) for part in (q, k, v)]
    if tape is None:
        out, cache = _attend(*flat, cache, depth)
    else:
        out = _attend_taped(*flat, cache, depth, tape)
        # The tape has the gradient of the cache. Dead code where, as on the way back, nobody asks for it.
        cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)
    return out.reshape(q.shape), cache


def start_tape(cache: DepthCache, heads: int, size: int) -> Tape:
    """The empty tape for the backward pass of a depth scan over this cache.

    Args:
        cache: only its shape and dtype matter.
        heads: query heads n.
        size: head size d.
    """
    shape = (cache.keys.shape[1], heads, size)
    if no_kernels_here() or unsupported(shape, cache.keys.dtype, cache):
        return xla.start_tape(cache, heads, size)
    return pull.start_tape(cache, heads, size)


@jax.custom_vjp
def _attend(q, k, v, cache, depth):
    out, *cache = tpu.attend(q, k, v, cache, depth, write=True)
    return out, DepthCache(*cache)


def _forward(q, k, v, cache, depth):
    return _attend(q, k, v, cache, depth), (q, k, v, cache, depth)


def _backward(residuals, cotangents):
    """Without a tape the whole cache gets a gradient: as much memory traffic as the XLA form, so this is that."""
    q, k, v, cache, depth = residuals
    size = head_size(k)

    def attend(q, k, v, cache):
        q, k, v = (part.reshape(part.shape[0], -1, size) for part in (q, k, v))
        out, cache = xla.depth_attention(q, k, v, cache, depth)
        return out.reshape(out.shape[0], -1), cache

    return *jax.vjp(attend, q, k, v, cache)[1](cotangents), None


_attend.defvjp(_forward, _backward)


@jax.custom_vjp
def _attend_taped(q, k, v, cache, depth, tape):
    del tape
    return tpu.attend(q, k, v, cache, depth, write=False)[0]


def _forward_taped(q, k, v, cache, depth, tape):
    out, logs = map(keep, tpu.attend(q, k, v, cache, depth, write=False))
    return out, (q, k, v, out, logs, cache, depth, tape)


def _backward_taped(residuals, d_out):
    q, k, v, out, logs, cache, depth, tape = residuals
    gradients, tape = pull.pull_gradients((q, k, v, out, d_out), logs, cache, tape, depth)
    return *gradients, None, None, tape


_attend_taped.defvjp(_forward_taped, _backward_taped)
