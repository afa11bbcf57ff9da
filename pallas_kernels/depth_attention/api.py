"""Typed entry of depth attention, and its custom VJPs."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from dreamer_jax.config.values import Implementation
from pallas_kernels.backend import backend
from pallas_kernels.depth_attention import pull, tpu, xla
from pallas_kernels.depth_attention.cache import DepthCache, write_slot
from pallas_kernels.depth_attention.layout import head_size
from pallas_kernels.depth_attention.shapes import unsupported
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape


@dataclass(frozen=True)
class DepthAttention:
    """Attention of each token over its own depths 0 .. depth (Algorithm 1); softmax in float32.

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

        Returns:
            [T, n, d], and the cache with slot `depth` filled.
        """
        if depth.ndim or self._backend(q.shape, q.dtype, cache) != "pallas":
            return xla.depth_attention(q, k, v, cache, depth, tape)
        flat = [part.reshape(part.shape[0], -1).astype(q.dtype) for part in (q, k, v)]
        if tape is None:
            out, cache = _attend(*flat, cache, depth)
        else:
            out = _attend_taped(*flat, cache, depth, tape)
            # The tape has the gradient of the cache. Dead code where, as on the way back, nobody asks for it.
            cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)
        return out.reshape(q.shape), cache

    def start_tape(self, cache: DepthCache, heads: int, size: int) -> Tape:
        """The empty tape for the backward pass of a depth scan over this cache.

        Args:
            cache: only its shape and dtype matter.
            heads: query heads n.
            size: head size d.
        """
        shape = (cache.keys.shape[1], heads, size)
        kernel = self._backend(shape, cache.keys.dtype, cache) == "pallas"
        return pull.start_tape(cache, heads, size) if kernel else xla.start_tape(cache)

    def _backend(self, shape, dtype, cache):
        return backend("depth attention", self.implementation, lambda: unsupported(shape, dtype, cache))


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
