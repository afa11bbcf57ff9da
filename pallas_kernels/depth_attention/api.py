"""Typed entry of depth attention, and its custom VJPs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from dreamer_jax.config.values import Implementation
from pallas_kernels.backend import backend
from pallas_kernels.depth_attention import near_tpu, pull, tpu, triton, windowed, xla
from pallas_kernels.depth_attention.cache import DepthCache, Ring, write_slot
from pallas_kernels.depth_attention.layout import head_size
from pallas_kernels.depth_attention.shapes import unsupported
from pallas_kernels.depth_attention.window import WHOLE, Window
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape


@dataclass(frozen=True)
class DepthAttention:
    """Attention of each token over its own depths 0 .. depth (Algorithm 1), or some of them; softmax in float32.

    Attributes:
        implementation: see `pallas_kernels.backend`.
    """

    implementation: Implementation = "auto"

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: DepthCache,
        depth: jax.Array,
        tape: Tape | None = None,
        window: Window = WHOLE,
    ) -> tuple[jax.Array, DepthCache]:
        """One depth.

        Differentiable in q, k, v and the cache. In the depth scan a tape is given where there will be a backward pass:
        then the cache gets no gradient, and the tape's gradient is the tape's new value.

        Args:
            q: [T, n, d], depth-encoded.
            k, v: [T, kv, d], the keys (depth-encoded) and values of this depth; head i of q attends with i // (n //
                kv).
            cache: filled below `depth`.
            depth: int32, [] or, in inference, of each token [T].
            tape: see `start_tape`.
            window: which of the depths are seen.

        Returns:
            [T, n, d], and the cache with slot `depth` filled.
        """
        window = _left_out(window, cache)
        form = "xla" if depth.ndim else self._backend(q.shape, q.dtype, cache, window)
        if form == "gpu":
            return triton.depth_attention(q, k, v, cache, depth, tape)  # type: ignore[arg-type]
        if form != "pallas":
            return _by_xla(q, k, v, cache, depth, window, tape)
        flat = [part.reshape(part.shape[0], -1).astype(q.dtype) for part in (q, k, v)]
        out: Any
        if tape is None:
            out, cache = _attend(window, *flat, cache, depth)
        else:
            out = _attend_taped(window, *flat, cache, depth, tape)
            # The tape has the gradient of the cache. Dead code where, as on the way back, nobody asks for it.
            cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)
        return out.reshape(q.shape), cache

    def start_tape(self, cache: DepthCache, heads: int, size: int, window: Window = WHOLE) -> Tape:
        """The empty tape for the backward pass of a depth scan over this cache.

        Args:
            cache: only its shape and dtype matter.
            heads: query heads n.
            size: head size d.
            window: which of the depths are seen.
        """
        window, shape = _left_out(window, cache), (cache.keys.shape[1], heads, size)
        if self._backend(shape, cache.keys.dtype, cache, window) == "pallas":
            return pull.start_tape(cache, heads, size, window)
        return xla.start_tape(cache) if window.whole else windowed.start_tape(cache, window)

    def _backend(self, shape, dtype, cache, window):
        return backend(
            "depth attention",
            self.implementation,
            lambda: unsupported(shape, dtype, cache, window),
            lambda: triton.unsupported(shape, cache, window),
        )


def _left_out(window: Window, cache: DepthCache) -> Window:
    """`WHOLE` where a cache of every depth has no more slots than are seen: then it is plain depth attention."""
    return window if isinstance(cache, Ring) else window.of(cache.keys.shape[0])


def _by_xla(q, k, v, cache, depth, window, tape=None):
    if window.whole:
        return xla.depth_attention(q, k, v, cache, depth, tape)
    return windowed.depth_attention(q, k, v, cache, depth, window, tape)


def _kernel(window, q, k, v, cache, depth, write):
    if window.whole:
        return tpu.attend(q, k, v, cache, depth, write)
    return near_tpu.attend(q, k, v, cache, depth, window, write)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window, q, k, v, cache, depth):
    out, *slots = _kernel(window, q, k, v, cache, depth, write=True)
    return out, type(cache)(*slots)


def _forward(window, q, k, v, cache, depth):
    return _attend(window, q, k, v, cache, depth), (q, k, v, cache, depth)


def _backward(window, residuals, cotangents):
    """Without a tape the whole cache gets a gradient: as much memory traffic as the XLA form, so this is that."""
    q, k, v, cache, depth = residuals
    size = head_size(k)

    def attend(q, k, v, cache):
        q, k, v = (part.reshape(part.shape[0], -1, size) for part in (q, k, v))
        out, cache = _by_xla(q, k, v, cache, depth, window)
        return out.reshape(out.shape[0], -1), cache

    return *jax.vjp(attend, q, k, v, cache)[1](cotangents), None


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_taped(window, q, k, v, cache, depth, tape):
    del tape
    return _kernel(window, q, k, v, cache, depth, write=False)[0]


def _forward_taped(window, q, k, v, cache, depth, tape):
    out, logs = map(keep, _kernel(window, q, k, v, cache, depth, write=False))
    return out, (q, k, v, out, logs, cache, depth, tape)


def _backward_taped(window, residuals, d_out):
    q, k, v, out, logs, cache, depth, tape = residuals
    rows = q, k, v, out, d_out
    if window.whole:
        gradients, tape = pull.pull_gradients(rows, logs, cache, tape, depth)
    else:
        gradients, tape = near_tpu.pull_gradients(rows, logs, cache, tape, depth, window)
    return *gradients, None, None, tape


_attend_taped.defvjp(_forward_taped, _backward_taped)
