"""Depth attention with a window or dilation, without a kernel: the slots that are seen are taken out of the cache.

They come newest first, so that of those the first l // s + 1 are there at depth l: with them it is plain depth
attention over fewer slots.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.depth_attention import xla
from pallas_kernels.depth_attention.cache import DepthCache, write_slot
from pallas_kernels.depth_attention.window import Window
from pallas_kernels.tape import Tape


class WindowGradient(flax.struct.PyTreeNode, Tape):
    """The float32 gradient of the slots that the present depth or shallower ones may still add to, newest first.

    It moves on by one depth whenever it is used: right for a scan that goes back through every depth, deepest first.

    Attributes:
        keys, values: [R, T, kv d]; row a is that of the slot a depths below.
    """

    keys: jax.Array
    values: jax.Array


def depth_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: DepthCache,
    depth: jax.Array,
    window: Window,
    tape: Tape | None = None,
) -> tuple[jax.Array, DepthCache]:
    """Same contract as `DepthAttention`; the tape is that of `start_tape` here. The cache may be a `Ring` of the
    window's span."""
    if tape is None:
        cache = write_slot(cache, k, v, depth)
        return xla.attend(q, seen(cache, depth, window), depth // window.dilation), cache
    cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)
    return _attend_taped(window, q, k, v, cache, depth, tape), cache


def start_tape(cache: DepthCache, window: Window) -> WindowGradient:
    """The empty tape for a cache of this shape."""
    slots, *rows = cache.keys.shape
    # Two arrays: the depth scan tells leaves of a tape from one another by which array they are.
    return WindowGradient(*(jnp.zeros((window.span(slots), *rows), jnp.float32) for _ in cache))


def seen(cache: DepthCache, depth: jax.Array, window: Window) -> DepthCache:
    """The w slots at depth, depth - s, ... as a cache of w slots, newest first; any slots where there are none.

    Args:
        cache: filled up to `depth`.
        depth: int32, [] or of each token [T].
        window: which.
    """
    slots = cache.keys.shape[0]
    # No two of them fall on one slot: w slots that lie s apart span no more than there are.
    at = [(depth - n * window.dilation) % slots for n in range(window.most(slots))]
    if depth.ndim:
        places = jnp.stack(at)[..., None]  # [w, T, 1]
        return DepthCache(*(jnp.take_along_axis(part, places, axis=0) for part in cache))
    return DepthCache(
        *(jnp.stack([jax.lax.dynamic_index_in_dim(part, n, 0, keepdims=False) for n in at]) for part in cache)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_taped(window, q, k, v, cache, depth, tape):
    del k, v, tape  # k and v are in the cache already; here they are what gets the gradient
    return xla.attend(q, seen(cache, depth, window), depth // window.dilation)


def _forward_taped(window, q, k, v, cache, depth, tape):
    out, weights = xla.weighed(q, seen(cache, depth, window), depth // window.dilation)
    return out, (q, cache, weights, depth, tape)


def _backward_taped(window, residuals, d_out):
    q, cache, weights, depth, tape = residuals
    d_q, d_seen = xla.gradients(q, seen(cache, depth, window), weights, d_out)
    new: Any = [_added(total, d, window) for total, d in zip((tape.keys, tape.values), d_seen, strict=True)]
    d_k, d_v = (total[0].reshape(q.shape[0], -1, q.shape[-1]).astype(q.dtype) for total in new)
    # The next shallower depth comes next: what is a depths below this one is a - 1 below that.
    tape = WindowGradient(*(jnp.concatenate([total[1:], jnp.zeros_like(total[:1])]) for total in new))
    return d_q, d_k, d_v, None, None, tape


_attend_taped.defvjp(_forward_taped, _backward_taped)


def _added(total: jax.Array, d_seen: jax.Array, window: Window) -> jax.Array:
    """The gradient [R, T, kv d] with that of the seen slots [w, T, kv d], which lie s apart."""
    return total + jax.lax.pad(d_seen, jnp.float32(0), [(0, 0, window.dilation - 1), (0, 0, 0), (0, 0, 0)])
