"""The depth scan: one layer applied L times (DR), or L layers in a row (LA), with memory linear in L.

Contract of the layer, a pure function:

    layer(weights, x, l, cache, *constants) -> (x', (k, v) | None, counts)

    carry     x [B, S, h], the residual stream, and the depth-attention cache (keys, values), each [L, T, kv, d]
    weights   the same at every depth (shared), or the l-th slice of stacked ones
    counts    small integers a depth, returned stacked; they carry no gradient

    for l in 0 .. depth-1:
        states[l] = x
        x, (k, v), counts[l] = layer(weights, x, l, cache, *constants)
        cache[l] = (k, v)

Plain reverse mode through that loop would save the whole cache at every depth: O(L^2). The backward pass here
keeps `states` and the final cache only. Going down from the last depth it recomputes layer l from states[l]; the
layer overwrites row l of the cache itself and masks the rows above, so the final cache serves every depth. The
cotangent of (k, v) at depth l is what the deeper layers have left in row l of the cache's cotangent by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
FLOAT32_LEAVES = ("scale", "keys")
"""Parameters that stay float32 in the compute copy: norm scales and router keys (routing is float32)."""


def cast_weights(params: PyTree, dtype: jnp.dtype) -> PyTree:
    """The compute copy of the parameters: matrices in `dtype`, norm scales and router keys as they are."""

    def cast(path, leaf):
        return leaf if path[-1].key in FLOAT32_LEAVES else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def depth_scan(
    layer: Callable[..., tuple[jax.Array, PyTree, PyTree]],
    params: PyTree,
    x: jax.Array,
    cache: PyTree,
    constants: tuple[PyTree, ...],
    depth: int | jax.Array,
    *,
    slots: int,
    shared: bool,
    remat: str,
) -> tuple[jax.Array, PyTree]:
    """Apply the layer at depths 0 .. depth-1.

    Args:
        layer: see the module's docstring.
        params: float32 parameters of the layer, with a leading axis over depths unless `shared`. They are cast to
            x's dtype once, before the loop; their gradients are summed over depths in float32.
        x: [B, S, h], compute dtype.
        cache: zeros, (keys, values), each [slots, T, kv, d]; None without depth attention.
        constants: passed on to every depth; get no gradient.
        depth: L. A traced scalar, at most `slots`, makes it a run-time number.
        slots: static bound on the depth.
        shared: one set of parameters for all depths.
        remat: "full": memory linear in L, as described above. "none": plain autodiff, which keeps every
            intermediate; needs a static depth.

    Returns:
        The final x [B, S, h] and the counts, stacked over depths [slots, ...] (zero from `depth` on).
    """
    if remat == "none" and isinstance(depth, int):
        return _plain_scan(layer, params, x, cache, constants, depth, shared)
    return _linear_memory_scan(layer, slots, shared)(params, x, cache, constants, jnp.asarray(depth, jnp.int32))


def _plain_scan(layer, params, x, cache, constants, depth, shared):
    weights = cast_weights(params, x.dtype)

    def body(carry, step):
        x, cache = carry
        l, own = step
        x, key_value, counts = layer(weights if shared else own, x, l, cache, *constants)
        return (x, _write(cache, key_value, l)), counts

    steps = (jnp.arange(depth), None if shared else jax.tree.map(lambda rows: rows[:depth], weights))
    (x, _), counts = jax.lax.scan(body, (x, cache), steps)
    return x, counts


def _linear_memory_scan(layer, slots, shared):
    def at(weights, l):
        return weights if shared else _read(weights, l)

    def forward_loop(params, x, cache, constants, depth, keep_states):
        weights = cast_weights(params, x.dtype)
        shapes = jax.eval_shape(layer, at(weights, 0), x, 0, cache, *constants)[2]
        counts = jax.tree.map(lambda c: jnp.zeros((slots, *c.shape), c.dtype), shapes)
        states = jnp.zeros((slots, *x.shape), x.dtype) if keep_states else None

        def body(l, carry):
            x, cache, counts, states = carry
            states = _write(states, x if keep_states else None, l)
            x, key_value, counted = layer(at(weights, l), x, l, cache, *constants)
            return x, _write(cache, key_value, l), _write(counts, counted, l), states

        return jax.lax.fori_loop(0, depth, body, (x, cache, counts, states))

    @jax.custom_vjp
    def scan(params, x, cache, constants, depth):
        x, _, counts, _ = forward_loop(params, x, cache, constants, depth, keep_states=False)
        return x, counts

    def forward(params, x, cache, constants, depth):
        x, cache, counts, states = forward_loop(params, x, cache, constants, depth, keep_states=True)
        return (x, counts), (params, states, cache, constants, depth)

    def backward(residuals, cotangents):
        params, states, cache, constants, depth = residuals
        weights = cast_weights(params, states.dtype)

        def body(step, carry):
            d_x, d_cache, d_params = carry
            l = depth - 1 - step

            def recompute(own, x, cache):
                return layer(own, x, l, cache, *constants)[:2]

            (_, key_value), vjp = jax.vjp(recompute, at(weights, l), _read(states, l), cache)
            d_key_value = jax.tree.map(lambda d, kv: d.astype(kv.dtype), _read(d_cache, l), key_value)
            d_own, d_x, d_rows = vjp((d_x, d_key_value))
            d_cache = jax.tree.map(lambda total, d: total + d.astype(jnp.float32), d_cache, d_rows)
            if shared:
                d_params = jax.tree.map(lambda total, d: total + d.astype(jnp.float32), d_params, d_own)
            else:
                d_params = _write(d_params, d_own, l)
            return d_x, d_cache, d_params

        d_cache = jax.tree.map(lambda c: jnp.zeros(c.shape, jnp.float32), cache)
        d_params = jax.tree.map(jnp.zeros_like, params)
        d_x, _, d_params = jax.lax.fori_loop(0, depth, body, (cotangents[0], d_cache, d_params))
        return d_params, d_x, jax.tree.map(jnp.zeros_like, cache), None, None

    scan.defvjp(forward, backward)
    return scan


def _read(tree, l):
    return jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, l, 0, keepdims=False), tree)


def _write(tree, rows, l):
    def update(all_rows, row):
        return jax.lax.dynamic_update_index_in_dim(all_rows, row.astype(all_rows.dtype), l, 0)

    return jax.tree.map(update, tree, rows)
