"""What happens within one pass, depth by depth and token by token: norms, changes, and when answers stand.

A pass of depth L is in general not the beginning of a deeper one: Dreamer's depth code, for one, counts the depths that
are left. So all that is said here is said of a pass of one depth. That is a number at run time: one program serves
passes of every depth up to its `slots`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.loss import chunks
from dreamer_jax.data import records
from dreamer_jax.families import Family, Pass, forward
from dreamer_jax.families.contract import Batch, Drawn

TAIL = 0.9
"""The quantile that is reported beside the mean."""


class Seen(NamedTuple):
    """What a pass over rows has shown, [slots, B, S] each; what stands behind the pass's depth has no meaning.

    Attributes:
        norm: of the stream after each depth, float32.
        residual: |x_{l+1} - x_l| / |x_l|, float32; infinite where x_l is 0.
        likeliest: int32, the likeliest token (of puzzles the likeliest class, [slots, B, 1]) read out after each depth.
        finished: bool, where a model that halts by itself needs no further depth; None if it never says so.
    """

    norm: jax.Array
    residual: jax.Array
    likeliest: jax.Array
    finished: jax.Array | None


def likeliest(family: Family, params: Any, hidden: jax.Array) -> jax.Array:
    """The likeliest token, or class, of what was read out: [B, P, readout_size] -> [B, P] int32, in chunks."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    if not family.flags.generates:
        return jnp.argmax(family.logits(params, flat), axis=-1).astype(jnp.int32).reshape(hidden.shape[:2])
    (parts,) = chunks(family.head(params), flat)
    found = jax.lax.map(lambda part: jnp.argmax(family.logits(params, part), axis=-1), parts)
    return found.reshape(-1)[: len(flat)].astype(jnp.int32).reshape(hidden.shape[:2])


@functools.partial(jax.jit, static_argnums=(0, 1))
def answers(family: Family, slots: int, params: Any, model_state: Any, batch: Batch, depth: jax.Array) -> jax.Array:
    """The likeliest token at every place, or the likeliest class of every row, after a pass: [B, S] or [B, 1] int32.

    Args:
        family: the model.
        slots: a bound on the depth, known when it is compiled.
        params, model_state: of the model.
        batch: [B, S] each.
        depth: L.
    """
    params = family.cast(params)
    passed = forward(family, params, model_state, batch, Drawn(depth, slots))
    return likeliest(family, params, family.readout(params, passed.state, passed.memory, passed.context)[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def look(family: Family, slots: int, params: Any, model_state: Any, batch: Batch, depth: jax.Array) -> Seen:
    """One pass, seen at every depth; arguments as of `answers`."""
    folded, params = family.fold(params), family.cast(params)

    def observe(step: Callable[..., Any]) -> Callable[..., Any]:
        def observed(weights, state, inputs, depth, memory, context, tape=None):
            stepped = step(weights, state, inputs, depth, memory, context, tape)
            before, after = (family.stream(its).astype(jnp.float32) for its in (state, stepped.state))
            moved, norm = (jnp.linalg.norm(x, axis=-1) for x in (after - before, before))
            hidden = family.readout(params, stepped.state, memory, context)[0]
            finished = family.finished(folded, stepped.state, state, depth) if family.flags.halts else None
            seen = Seen(
                jnp.linalg.norm(after, axis=-1),
                jnp.where(norm > 0, moved / jnp.where(norm > 0, norm, 1), jnp.inf),
                likeliest(family, params, hidden),
                finished,
            )
            return stepped._replace(outputs=(), counts=seen)

        return observed

    passed: Pass = forward(family, params, model_state, batch, Drawn(depth, slots), observe=observe)
    return passed.counts


def counted(family: Family, batch: records.Batch) -> np.ndarray:
    """[B, S] bool, the places whose targets the loss counts; of puzzles [B, 1], the rows that have a question."""
    mask = batch["loss_mask"]
    return mask if family.flags.generates else np.any(mask, axis=1)[:, None]


def depths_needed(tokens: np.ndarray) -> np.ndarray:
    """From which depth on the likeliest token stays what it is at the end: [L, N] -> [N], depths from 1."""
    differs = tokens != tokens[-1]
    return 1 + (np.arange(1, len(tokens) + 1)[:, None] * differs).max(axis=0)


def summarise_pass(family: Family, batch: records.Batch, seen: Seen, depth: int) -> dict[str, Any]:
    """What is kept of a pass of one depth L, as numbers and lists that JSON can hold.

    Returns:
        `norm`, `residual` [L]: means over the tokens, padding excluded; `residual_tail` [L]: the quantile `TAIL` of the
        second. None where there is no such number (a first state that is 0). `needed` [L]: targets by the depths they
        need, from 1. `halted` [L + 1], of models that halt: targets by the depths they take, and those that never halt;
        some models halt at depth L whatever still runs.
    """
    real, mask = batch["segment_ids"] > 0, counted(family, batch)
    norm, residual = (np.asarray(its)[:depth][:, real] for its in (seen.norm, seen.residual))
    needed = depths_needed(np.asarray(seen.likeliest)[:depth][:, mask])
    found = {
        "norm": [number(row) for row in norm.mean(axis=1)],
        "residual": [number(row) for row in residual.mean(axis=1)],
        "residual_tail": [number(np.quantile(row, TAIL)) if np.isfinite(row).all() else None for row in residual],
        "needed": np.bincount(needed, minlength=depth + 1)[1:].tolist(),
    }
    if seen.finished is not None:
        finished = np.asarray(seen.finished)[:depth][:, batch["loss_mask"]]
        taken = np.where(finished.any(axis=0), finished.argmax(axis=0), depth)
        found["halted"] = np.bincount(taken, minlength=depth + 1).tolist()
    return found


def number(value: Any) -> float | None:
    """A number as JSON has them; None where it isn't finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
