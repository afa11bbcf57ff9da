"""Depth attention (Algorithm 1) on an NVIDIA GPU: Triton kernels (through Pallas) that read the slots a depth sees.

A program has some tokens, and the heads of one group; it walks the slots. Backward it adds this depth's share to the
float32 gradient of those slots where they lie, and what the forward pass leaves for it is a logarithm for each head.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.depth_attention import xla
from pallas_kernels.depth_attention.cache import DepthCache, write_slot
from pallas_kernels.depth_attention.window import Window
from pallas_kernels.depth_attention.xla import CacheGradient
from pallas_kernels.gpu import plgpu
from pallas_kernels.kept import keep

F32 = jnp.float32
LOG2_E = 1.4426950408889634
ROWS = 32
"""Tokens of a program with one head; with more heads fewer, so that its sums stay in registers."""


def unsupported(shape: tuple[int, ...], cache: DepthCache, window: Window) -> str | None:
    """Why the kernels don't take queries [T, n, d] of this shape with this cache and window, or None if they do."""
    heads, size = shape[1:]
    if not window.whole:
        return "a window is looked at"
    if size & (size - 1) or size > 256:
        return f"a head size of {size} isn't a power of two up to 256"
    if heads * size // cache.keys.shape[2] > 8:
        return f"more than 8 of {heads} heads share a key"
    return gpu.unsupported(cache.keys.size)


def depth_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, tape: CacheGradient | None = None
) -> tuple[jax.Array, DepthCache]:
    """Same contract as `DepthAttention`; the tape is that of `xla.start_tape`."""
    if tape is None:
        cache = write_slot(cache, k, v, depth)
        return _attend(q, cache, depth), cache
    cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)
    return _attend_taped(q, k, v, cache, depth, tape), cache


@jax.custom_vjp
def _attend(q, cache, depth):
    return _forward(q, cache, depth)[0]


def _attend_forward(q, cache, depth):
    return _attend(q, cache, depth), (q, cache, depth)


def _attend_backward(residuals, d_out):
    """Without a tape the whole cache gets a gradient, which is the XLA form's work."""
    q, cache, depth = residuals
    return *jax.vjp(lambda q, cache: xla.attend(q, cache, depth), q, cache)[1](d_out), None


_attend.defvjp(_attend_forward, _attend_backward)


@jax.custom_vjp
def _attend_taped(q, k, v, cache, depth, tape):
    del k, v, tape  # k and v are in the cache already; here they are what gets the gradient
    return _forward(q, cache, depth)[0]


def _taped_forward(q, k, v, cache, depth, tape):
    out, logs = map(keep, _forward(q, cache, depth))
    return out, (q, out, logs, cache, depth, tape)


def _taped_backward(residuals, d_out):
    q, out, logs, cache, depth, tape = residuals
    d_q, *totals = _backward(q, out, logs, d_out, cache, depth, tape)
    d_k, d_v = (
        jax.lax.dynamic_index_in_dim(total, depth, 0, keepdims=False).reshape(q.shape[0], -1, q.shape[-1])
        for total in totals
    )
    return d_q, d_k.astype(q.dtype), d_v.astype(q.dtype), None, None, CacheGradient(*totals)


_attend_taped.defvjp(_taped_forward, _taped_backward)


def _forward(q: jax.Array, cache: DepthCache, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of q [T, n, d] over slots 0 .. depth: [T, n, d], and the logarithms to base 2 of the softmaxes'
    denominators [n, T] float32."""
    tokens, heads, size = q.shape
    kv_heads = cache.keys.shape[2] // size
    rows = _rows(heads // kv_heads)
    out, logs = pl.pallas_call(
        functools.partial(_forward_kernel, rows=rows, group=heads // kv_heads, size=size),
        grid=(pl.cdiv(tokens, rows), kv_heads),
        out_shape=(jax.ShapeDtypeStruct((tokens, heads * size), q.dtype), jax.ShapeDtypeStruct((heads, tokens), F32)),
        name="depth_attention_forward",
        **gpu.compile_for(warps=4),
    )(depth[None], q.reshape(tokens, -1), *cache)
    return out.reshape(q.shape), logs


def _forward_kernel(depth_ref, q_ref, keys_ref, values_ref, out_ref, logs_ref, *, rows, group, size):
    tokens, mask, head = _tokens(q_ref.shape[0], rows)
    columns = pl.ds(head * size, size)
    places = [pl.ds((head * group + g) * size, size) for g in range(group)]
    queries = [_read(q_ref.at[tokens, place], mask) * (size**-0.5 * LOG2_E) for place in places]

    def look(slot, sums):
        k, v = (_read(ref.at[slot, tokens, columns], mask) for ref in (keys_ref, values_ref))
        new = []
        for q, (most, total, out) in zip(queries, sums, strict=True):
            logit = jnp.sum(q * k, axis=1)
            larger = jnp.maximum(most, logit)
            shrink, weight = jnp.exp2(most - larger), jnp.exp2(logit - larger)
            new.append((larger, total * shrink + weight, out * shrink[:, None] + weight[:, None] * v))
        return tuple(new)

    nothing = jnp.full(rows, -1e30, F32), jnp.zeros(rows, F32), jnp.zeros((rows, size), F32)
    sums = jax.lax.fori_loop(jnp.int32(0), depth_ref[0] + 1, look, (nothing,) * group)
    for g, (place, (most, total, out)) in enumerate(zip(places, sums, strict=True)):
        _write(out_ref.at[tokens, place], out / total[:, None], mask)
        _write(logs_ref.at[head * group + g, tokens], most + jnp.log2(total), mask)


def _backward(q, out, logs, d_out, cache, depth, tape):
    """(d_q [T, n, d], the totals of keys and of values with this depth's share added, in place)."""
    tokens, heads, size = q.shape
    kv_heads = cache.keys.shape[2] // size
    rows = _rows(heads // kv_heads)
    d_q, *totals = pl.pallas_call(
        functools.partial(_backward_kernel, rows=rows, group=heads // kv_heads, size=size),
        grid=(pl.cdiv(tokens, rows), kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, heads * size), q.dtype),
            *(jax.ShapeDtypeStruct(total.shape, F32) for total in (tape.keys, tape.values)),
        ],
        input_output_aliases={7: 1, 8: 2},
        name="depth_attention_backward",
        **gpu.compile_for(warps=4),
    )(depth[None], *(part.reshape(tokens, -1) for part in (q, out, d_out)), logs, *cache, tape.keys, tape.values)
    return d_q.reshape(q.shape), *totals


def _backward_kernel(depth_ref, q_ref, out_ref, d_out_ref, logs_ref, keys_ref, values_ref, *refs, rows, group, size):
    d_q_ref, d_keys_ref, d_values_ref = refs[2:]  # the totals are read through the aliased outputs
    tokens, mask, head = _tokens(q_ref.shape[0], rows)
    columns = pl.ds(head * size, size)
    places = [pl.ds((head * group + g) * size, size) for g in range(group)]
    asked = []
    for g, place in enumerate(places):
        q, out, d_out = (_read(ref.at[tokens, place], mask) for ref in (q_ref, out_ref, d_out_ref))
        log = _read(logs_ref.at[head * group + g, tokens], mask)
        asked.append((q * size**-0.5, d_out, log, jnp.sum(out * d_out, axis=1)))

    def look(slot, d_queries):
        k, v = (_read(ref.at[slot, tokens, columns], mask) for ref in (keys_ref, values_ref))
        totals = [ref.at[slot, tokens, columns] for ref in (d_keys_ref, d_values_ref)]
        d_k, d_v = (_read(total, mask) for total in totals)
        new = []
        for (q, d_out, log, product), d_q in zip(asked, d_queries, strict=True):
            weight = jnp.exp2(jnp.sum(q * k, axis=1) * LOG2_E - log)
            d_logit = (weight * (jnp.sum(d_out * v, axis=1) - product))[:, None]
            d_k, d_v = d_k + d_logit * q, d_v + weight[:, None] * d_out
            new.append(d_q + d_logit * k)
        _write(totals[0], d_k, mask)
        _write(totals[1], d_v, mask)
        return tuple(new)

    nothing = (jnp.zeros((rows, size), F32),) * group
    d_queries = jax.lax.fori_loop(jnp.int32(0), depth_ref[0] + 1, look, nothing)
    for place, d_q in zip(places, d_queries, strict=True):
        _write(d_q_ref.at[tokens, place], d_q * size**-0.5, mask)


def _tokens(total, rows):
    """Of this program: the slice of tokens, which of them there are, None for all, and the key head."""
    first = pl.program_id(0) * rows
    mask = None if total % rows == 0 else first + jnp.arange(rows, dtype=jnp.int32) < total
    return pl.ds(first, rows), mask, pl.program_id(1)


def _read(ref, mask):
    """Float32, zero for tokens that there aren't."""
    if mask is not None:
        mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (len(ref.shape) - 1)), ref.shape)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0).astype(F32)


def _write(ref, value, mask):
    if mask is not None:
        mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (len(ref.shape) - 1)), ref.shape)
    plgpu.store(ref, value.astype(ref.dtype), mask=mask)


def _rows(group):
    return max(4, ROWS // (1 << (group - 1).bit_length()))
