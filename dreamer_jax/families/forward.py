"""A pass of any family over whole rows, and fresh parameters: for training, evaluation, analysis and counting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.core
import jax.numpy as jnp

from dreamer_jax.blocks.memory import Context
from dreamer_jax.config.values import Remat
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Batch, Drawn, Family, Pass, PyTree
from dreamer_jax.recurrence import DepthScan, Stepped


def forward(
    family: Family,
    params: PyTree,
    model_state: dict[str, PyTree],
    batch: Batch,
    depth: int | jax.Array | Drawn | None = None,
    remat: Remat = "full",
    key: jax.Array | None = None,
    observe: Callable[..., Any] | None = None,
    initial_state: PyTree | None = None,
    state_scale: float | jax.Array = 1.0,
    kept_states: int = 0,
) -> Pass:
    """A pass over whole rows.

    Args:
        family: the model.
        params: float32, or cast already.
        model_state: the model's own, by collection.
        batch: `tokens` [B, S] int32; `segment_ids`, documents of a packed row from 1, 0 for padding, by default one
            document a row; `positions` in their documents, by default 0..S-1; `rows` [B], their numbers in the global
            batch, by default 0..B-1, which what a row draws depends on; `visible` [B, S, S] bool and `read` [B, R]
            int32, see Context.
        depth: L, None for the trained one. A recurrent model takes any, another one at most the layers it has; a
            traced scalar may not exceed the trained depth.
        remat: what is kept for the backward pass.
        key: for what a pass draws; None in evaluation.
        observe: gets the step (see recurrence/scan.py) and returns another of that contract; what it returns in place
            of the counts comes back stacked over the depths.
        initial_state: of depth 0, in place of the family's own.
        state_scale: of a random one.
        kept_states: return the states after so many depths, the last ones, in place of their outputs.
    """
    drawn = depth if isinstance(depth, Drawn) else _drawn(family, depth)
    rows, length = batch["tokens"].shape[:2]
    context = _context(family, batch, model_state, key)
    entered, memory = family.enter(params, batch, family.fresh(rows, length, drawn.slots), context)
    if initial_state is None:
        initial_state = family.start(entered, context, state_scale)
    weights = family.weights(family.prepare(params, model_state))
    scan = DepthScan(
        observe(family.step) if observe else family.step,
        drawn.slots,
        remat,
        family.cast_weights,
        lambda: family.start_tape(weights, rows * length, drawn.slots),
        drawn.gradient_depths,
        family.output_depths,
    )
    inputs, depth = family.inputs(entered), jnp.asarray(drawn.depth, jnp.int32)
    if (depth.ndim or kept_states) and not family.flags.weighs_depths:
        scan = dataclasses.replace(scan, step=_without_outputs(scan.step, family.config.family))
    if depth.ndim:
        state, counts = _row_by_row(family, scan, weights, initial_state, inputs, context, drawn)
        return Pass(state, (), counts, inputs, memory, context, depth)
    if kept_states:
        scan = dataclasses.replace(scan, step=_showing_states(scan.step), output_depths=kept_states)
    state, outputs, counts, left = scan(
        weights, initial_state, inputs, memory, context, drawn.depth, drawn.differentiated
    )
    passed = Pass(state, outputs, counts, inputs, memory, context, depth, left=left)
    return passed._replace(outputs=(), states=outputs) if kept_states else passed


def _context(family: Family, batch: Batch, model_state: dict[str, PyTree], key: jax.Array | None) -> Context:
    """What every depth knows of the rows, with the defaults of `forward`."""
    rows, length = batch["tokens"].shape[:2]
    segments, positions = batch.get("segment_ids"), batch.get("positions")
    if segments is None:
        segments = jnp.ones((rows, length), jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    visible = batch.get("visible")
    if visible is not None and family.flags.causal:
        raise UserError(f"models of the family {family.config.family} are causal; they can't attend along a graph")
    keys = None if key is None else _keys(key, batch, rows)
    return Context(segments, positions, model_state, keys, visible, batch.get("read"), key)


def _without_outputs(step: Callable[..., Stepped], name: str) -> Callable[..., Stepped]:
    """The step, which has no outputs that its family's loss could ask for."""

    def checked(*arguments: Any, **tape: Any) -> Stepped:
        stepped = step(*arguments, **tape)
        if jax.tree.leaves(stepped.outputs):
            raise UserError(
                f"steps of family {name} have outputs for its loss, which aren't kept here (recurrence.by row, or "
                "recurrence.scored); the family's flags should say weighs_depths=True"
            )
        return stepped

    return checked


def _showing_states(step: Callable[..., Stepped]) -> Callable[..., Stepped]:
    """The step with its state as its outputs."""

    def showing(*arguments: Any, **tape: Any) -> Stepped:
        stepped = step(*arguments, **tape)
        return stepped._replace(outputs=stepped.state)

    return showing


def _row_by_row(family, scan, weights, state, inputs, context, drawn):
    """The state after the last depth, of rows with depths [B] of their own, and the counts of all.

    Rows are sorted by depth. Those of a group go through the depths together, as many as its deepest has. Where a step
    counts its depths, rows begin together, each on its way to its own L, and stay as they are once they are there.
    Where it doesn't, they end together, and a row with fewer depths begins later: so the last k depths, which truncated
    backpropagation differentiates, are every row's own last k.
    """
    rows, together = len(drawn.depth), family.flags.counts_depths
    if rows % drawn.groups:
        raise UserError(f"{rows} rows at once can't be divided into {drawn.groups} groups of like depth")

    def grouped(tree):
        def split(leaf):
            return leaf.reshape(drawn.groups, rows // drawn.groups, *leaf.shape[1:])

        return jax.tree.map(split, tree)

    def step(weights, state, inputs, depth, memory, both, tape=None):
        context, depths = both
        waits = depth.index >= depths if together else depth.index < depth.total - depths  # [B]
        if together:
            depth = depth._replace(total=jnp.broadcast_to(depths[:, None], context.segment_ids.shape))
        # Who waits is padding to the counts.
        context = context._replace(segment_ids=jnp.where(waits[:, None], 0, context.segment_ids))
        stepped = scan.step(weights, state, inputs, depth, memory, context, tape)

        def chosen(new, old):
            return jnp.where(waits.reshape(-1, *[1] * (new.ndim - 1)), old, new)

        return stepped._replace(state=jax.tree.map(chosen, stepped.state, state))

    def group(its):
        state, inputs, rows_of, depths, deepest = its
        its_context = (context._replace(**rows_of), depths)
        shape = rows_of["segment_ids"].shape
        its_scan = dataclasses.replace(
            scan, step=step, start_tape=lambda: family.start_tape(weights, shape[0] * shape[1], drawn.slots)
        )
        memory = family.fresh(*shape, drawn.slots)
        scanned = its_scan(weights, state, inputs, memory, its_context, deepest, drawn.differentiated)
        return scanned.state, scanned.counts

    by_row = {name: getattr(context, name) for name in ("segment_ids", "positions", "keys", "visible", "read")}
    by_row = {name: rows for name, rows in by_row.items() if rows is not None}
    order = jnp.argsort(drawn.depth)
    its = jax.tree.map(lambda leaf: jnp.take(leaf, order, axis=0), (state, inputs, by_row, drawn.depth))
    *its, depths = grouped(its)
    deepest = jnp.max(depths, axis=1) if drawn.group_depths is None else drawn.group_depths
    states, counts = jax.lax.map(group, (*its, depths, deepest))
    states = jax.tree.map(lambda leaf: leaf.reshape(rows, *leaf.shape[2:])[jnp.argsort(order)], states)
    return states, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), counts)


def _keys(key: jax.Array, batch: Batch, rows: int) -> jax.Array:
    """[B], a key for each row, whichever device and microbatch it is in."""
    numbers = batch.get("rows", jnp.arange(rows))
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)


def _drawn(family: Family, depth: int | jax.Array | None) -> Drawn:
    if depth is None:
        return Drawn(family.depth, family.depth)
    if isinstance(depth, jax.core.Tracer):
        return Drawn(depth, family.depth)
    known = family.check_depth(depth)  # type: ignore[arg-type]
    return Drawn(known, known)


def initialise(family: Family, key: jax.Array) -> tuple[Any, dict[str, Any]]:
    """Fresh (params, model state) as plain arrays, without boxes.

    Args:
        family: the model.
        key: PRNG key; the same key gives the same parameters on every machine.
    """
    # Drawing every matrix takes the CPU backend seconds to compile at full effort; this little gives the same bits.
    quick = jax.default_backend() == "cpu" and not isinstance(key, jax.core.Tracer)
    options = {"xla_backend_optimization_level": 1} if quick else None
    return jax.jit(lambda key: nn.meta.unbox(family.init(key)), compiler_options=options)(key)
