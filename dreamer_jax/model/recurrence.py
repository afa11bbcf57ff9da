"""The depth scan: one layer applied L times (DR), or L layers in a row (LA), with memory linear in L.

Contract of the layer, a pure function:

    layer(weights, x, l, cache, *constants) -> (x', cache', counts)

    carry     x [B, S, h], the residual stream, and the cache of the depth attention, whose slot l the layer fills;
              this module never looks inside
    weights   the same at every depth (shared), or the l-th slice of stacked ones
    counts    small integers a depth, returned stacked; they carry no gradient

    for l in 0 .. depth-1:
        states[l] = x
        x, cache, counts[l] = layer(weights, x, l, cache, *constants)

Plain reverse mode through that loop would save the whole cache at every depth: O(L^2). The backward pass here
keeps `states` and the final cache only, and hands a *tape* down the depths: what the deeper ones leave for the
shallower, which is all that the cache's gradient is needed for.

    tape = start_tape()
    for l in depth-1 .. 0:
        _, vjp = jax.vjp(lambda w, x, tape: layer(w, x, l, cache, *constants, tape=tape)[0], weights, states[l], tape)
        d_weights, d_x, tape = vjp(d_x)

Given a tape, the layer finds slots 0 .. l of the final cache as it would have left them and needn't write. Values
leave a reverse pass only as gradients, so an operation that takes a part of the tape returns, in the place of that
part's gradient, its new value. What is on the tape is the operations' own business: gradients to be added to, in
float32, or queries from which shallower keys pull theirs (see pallas_kernels/depth_attention).

What is kept of a depth for this (`Remat`): "full" keeps states[l] alone and computes the layer again. The others run
the layer under jax.vjp on the way down already, with an empty tape, and keep what its reverse pass asks for:
everything ("none"), or what is named KEPT, from which the rest is quickly computed again ("attention"). Whatever of
that is an input of the layer or the cache it returns isn't kept but put in its place on the way back: the weights are
not stored once a depth, nor is the cache, whose final state serves every depth.

Gradients of the weights themselves may be on the tape too: then the layer returns none for them, no array of their
size is written and added up at every depth, and what they need may be kept for several depths before it is added
(`settle`, see pallas_kernels/expert_mlp/tape.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Remat
from pallas_kernels.kept import KEPT

PyTree = Any
FLOAT32_LEAVES = ("scale", "keys")
"""Parameters that stay float32 in the compute copy: norm scales and router keys (routing is float32)."""


@dataclass(frozen=True)
class TapeRules:
    """How the depth scan handles a tape it knows nothing else about.

    Attributes:
        start: makes the empty tape, float32 or compute dtype, when the backward pass begins.
        settle: tape -> tape, called after every `every` depths and after the last one.
        every: see `settle`.
        gradients: tape -> gradients of the weights that are on it, a part of the tree of parameters.
    """

    start: Callable[[], PyTree] = dict
    settle: Callable[[PyTree], PyTree] = lambda tape: tape
    every: int = 1
    gradients: Callable[[PyTree], dict[str, Any]] = lambda tape: {}


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
    remat: Remat,
    tape_rules: TapeRules | None = None,
) -> tuple[jax.Array, PyTree]:
    """Apply the layer at depths 0 .. depth-1.

    Args:
        layer: see the module's docstring.
        params: float32 parameters of the layer, with a leading axis over depths unless `shared`. They are cast to
            x's dtype once, before the loop; their gradients are summed over depths in float32.
        x: [B, S, h], compute dtype.
        cache: empty, of `slots` depths; None without depth attention.
        constants: passed on to every depth; get no gradient.
        depth: L. A traced scalar, at most `slots`, makes it a run-time number.
        slots: static bound on the depth.
        shared: one set of parameters for all depths.
        remat: what is kept for the backward pass, see the module's docstring; a traced depth takes "full".
        tape_rules: of the layer's tape; None for a layer without one.

    Returns:
        The final x [B, S, h] and the counts, stacked over depths [slots, ...] (zero from `depth` on).
    """
    rules = tape_rules or TapeRules()
    if remat == "full" or not isinstance(depth, int):
        scan = _recomputing_scan(layer, slots, shared, rules)
        return scan(params, x, cache, constants, jnp.asarray(depth, jnp.int32))
    return _recording_scan(layer, depth, slots, shared, rules, remat)(params, x, cache, constants)


def _recomputing_scan(layer, slots, shared, rules):
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
            x, cache, counted = layer(at(weights, l), x, l, cache, *constants)
            return x, cache, _write(counts, counted, l), states

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

        def vjp_at(l, own, taped, tape):
            def recompute(own, x, tape):
                return layer(_merged(own, taped), x, l, cache, *constants, tape=tape)[0]

            return jax.vjp(recompute, own, _read(states, l), tape)[1]

        d_params, d_x = _backward_loop(vjp_at, params, cotangents[0], depth, shared, rules)
        return d_params, d_x, jax.tree.map(jnp.zeros_like, cache), None, None

    scan.defvjp(forward, backward)
    return scan


def _recording_scan(layer, depth, slots, shared, rules, remat):
    """As `_recomputing_scan`, for a static depth; keeps more of the layer, by `remat`."""
    records = {}  # how to put the kept leaves together again; the same at every depth

    def forward_loop(params, x, cache, constants, keep):
        weights = cast_weights(params, x.dtype)

        def body(carry, l):
            # Everything the layer sees is an input of this body, so that it can be told from what the layer makes.
            x, cache, weights, constants = carry
            own = weights if shared else _read(weights, l)
            if not keep:
                x, cache, counts = layer(own, x, l, cache, *constants)
                return (x, cache, weights, constants), (counts, None)
            tape = rules.start()
            taped = _part(own, rules.gradients(tape))

            def record(own, x, tape):
                x, cache_after, counts = layer(_merged(own, taped), x, l, cache, *constants, tape=tape)
                return x, (cache_after, counts)

            if remat == "attention":
                policy = jax.checkpoint_policies.save_only_these_names(KEPT)
                record = jax.checkpoint(record, policy=policy, prevent_cse=False)
            x, vjp, (cache_after, counts) = jax.vjp(record, _without(own, taped), x, tape, has_aux=True)
            inputs = (own, l, (cache, cache_after), constants, tape)
            records["vjp"], kept = _take_apart(vjp, inputs)
            return (x, cache_after, weights, constants), (counts, kept)

        (x, cache, _, _), (counts, kept) = jax.lax.scan(body, (x, cache, weights, constants), jnp.arange(depth))
        padding = slots - depth
        counts = jax.tree.map(lambda c: jnp.pad(c, ((0, padding), *((0, 0),) * (c.ndim - 1))), counts)
        return x, cache, counts, kept

    @jax.custom_vjp
    def scan(params, x, cache, constants):
        x, _, counts, _ = forward_loop(params, x, cache, constants, keep=False)
        return x, counts

    def forward(params, x, cache, constants):
        x, cache, counts, kept = forward_loop(params, x, cache, constants, keep=True)
        return (x, counts), (params, kept, cache, constants)

    def backward(residuals, cotangents):
        params, kept, cache, constants = residuals

        def vjp_at(l, own, taped, tape):
            inputs = (_merged(own, taped), l, (cache, cache), constants, tape)
            return _put_together(records["vjp"], inputs, _read(kept, l))

        d_params, d_x = _backward_loop(vjp_at, params, cotangents[0], depth, shared, rules)
        return d_params, d_x, jax.tree.map(jnp.zeros_like, cache), None

    scan.defvjp(forward, backward)
    return scan


def _take_apart(vjp, inputs):
    """A function of jax.vjp as (how to put it together again, the arrays to keep): less those that are `inputs`."""
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(inputs))}
    leaves, structure = jax.tree.flatten(vjp)
    sources = [places.get(id(leaf)) for leaf in leaves]
    return (structure, sources), [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]


def _put_together(record, inputs, kept):
    """The inverse of `_take_apart`, with other inputs of the same structure."""
    structure, sources = record
    given, kept = jax.tree.leaves(inputs), iter(kept)
    return jax.tree.unflatten(structure, [next(kept) if place is None else given[place] for place in sources])


def _backward_loop(vjp_at, params, d_x, depth, shared, rules):
    """Down the depths: d_x of the last -> gradients of the parameters, float32, and d_x of the first.

    `vjp_at(l, own, taped, tape)` is the layer's pullback at depth l, d_x -> (d_own, d_x, tape); `own` are its weights
    less those whose gradients are on the tape, `taped` the others.
    """
    weights = cast_weights(params, d_x.dtype)
    tape = rules.start()
    taped = _part(weights, rules.gradients(tape))
    structure = jax.tree.structure(params)
    weights, params = _without(weights, taped), _without(params, taped)

    def body(step, carry):
        d_x, tape, d_params = carry
        l = depth - 1 - step
        own = weights if shared else _read(weights, l)
        d_own, d_x, tape = vjp_at(l, own, taped, tape)(d_x)
        if shared:
            d_params = jax.tree.map(lambda total, d: total + d.astype(jnp.float32), d_params, d_own)
        else:
            d_params = _write(d_params, d_own, l)
        return d_x, tape, d_params

    def stretch(i, carry):
        last = jnp.minimum((i + 1) * rules.every, depth)
        d_x, tape, d_params = jax.lax.fori_loop(i * rules.every, last, body, carry)
        return d_x, rules.settle(tape), d_params

    carry = (d_x, tape, jax.tree.map(jnp.zeros_like, params))
    if rules.every == 1:
        d_x, tape, d_params = jax.lax.fori_loop(0, depth, body, carry)
    else:
        d_x, tape, d_params = jax.lax.fori_loop(0, -(-depth // rules.every), stretch, carry)
    # As the parameters came, in whatever kind of dictionaries: their leaves have one order.
    return jax.tree.unflatten(structure, jax.tree.leaves(_merged(d_params, rules.gradients(tape)))), d_x


def _part(tree, names):
    """The part of a tree of dictionaries that stands where `names` has anything."""
    return {k: _part(tree[k], v) if isinstance(v, Mapping) else tree[k] for k, v in names.items()}


def _without(tree, part):
    """A tree of dictionaries less the leaves that stand in `part`."""
    rest = {k: v for k, v in tree.items() if k not in part}
    return rest | {k: _without(tree[k], v) for k, v in part.items() if isinstance(v, Mapping)}


def _merged(tree, part):
    """A tree of dictionaries with the leaves of `part` added."""
    return {**tree, **{k: _merged(tree[k], v) if isinstance(v, Mapping) else v for k, v in part.items()}}


def _read(tree, l):
    return jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, l, 0, keepdims=False), tree)


def _write(tree, rows, l):
    def update(all_rows, row):
        return jax.lax.dynamic_update_index_in_dim(all_rows, row.astype(all_rows.dtype), l, 0)

    return jax.tree.map(update, tree, rows)
