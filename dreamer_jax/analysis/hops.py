"""How far the news of a graph's source has travelled after each step: what a mask allows, and what the model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.analysis.convergence import SETTLED
from dreamer_jax.families import Family, forward

HOPS = 12
"""Longest distances that are told apart."""


def hops_from(visible: jax.Array, source: jax.Array) -> jax.Array:
    """[B, S] int32: edges from the source to each node; HOPS + 1 where it is further, or out of reach.

    Args:
        visible: [B, S, S] bool, whether row i sees column j: an edge leads from j to i.
        source: [B] int32.
    """
    at_source = jnp.arange(visible.shape[1]) == source[:, None]

    def step(reached: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        wider = reached | jnp.any(visible & reached[:, None], axis=-1)
        return wider, ~reached

    return jnp.sum(jax.lax.scan(step, at_source, None, length=HOPS + 1)[1], axis=0, dtype=jnp.int32)


def hop_sums(family: Family, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Nodes whose state would be another one if the source weren't marked, by their distance from it.

    Every graph is computed twice, with the source's token and with token 0 in its place.

    Args:
        family, params, model_state: the model.
        batch: of puzzles with `visible`; the source is the first position that is read.

    Returns:
        `hop_nodes` [HOPS + 1] int32, nodes by distance; and of them `hop_reached` [L, HOPS + 1] int32, those whose
        states differ after each step by at least SETTLED of their norm.
    """
    source, rows = batch["read"][:, 0], jnp.arange(len(batch["tokens"]))
    both = {name: jnp.concatenate([values, values]) for name, values in batch.items()}
    both["tokens"] = jnp.concatenate([batch["tokens"], batch["tokens"].at[rows, source].set(0)])
    one_hot = hops_from(batch["visible"], source)[..., None] == jnp.arange(HOPS + 1)
    nodes = one_hot & (batch["segment_ids"] > 0)[..., None]  # [B, S, HOPS + 1]

    def observe(step: Callable) -> Callable:
        def observed(weights, state, inputs, depth, memory, context, tape=None):
            stepped = step(weights, state, inputs, depth, memory, context, tape)
            marked, unmarked = jnp.split(family.stream(stepped.state).astype(jnp.float32), 2)
            moved = jnp.linalg.norm(marked - unmarked, axis=-1) >= SETTLED * jnp.linalg.norm(marked, axis=-1)
            reached = jnp.sum(nodes & moved[..., None], axis=(0, 1), dtype=jnp.int32)
            return stepped._replace(counts=reached)

        return observed

    reached = forward(family, params, model_state, both, observe=observe).counts
    return {"hop_reached": reached, "hop_nodes": jnp.sum(nodes, axis=(0, 1), dtype=jnp.int32)}


def hop_summary(reached: np.ndarray, nodes: np.ndarray) -> dict[str, Any]:
    """What analysis.json says of `hop_sums`, up to the longest distance that occurs.

    Returns:
        `threshold`; `nodes` [D + 1], by distance; `reached` [L, D + 1], shares of them; `frontier` [L], the longest
        distance up to which at least half of the nodes of each are reached; -1 where not even the source is.
    """
    longest = int(np.flatnonzero(nodes).max(initial=0))
    nodes = nodes[: longest + 1]
    shares = reached[:, : longest + 1] / np.maximum(nodes, 1)
    whole = np.logical_and.accumulate((shares >= 0.5) | (nodes == 0), axis=1)
    return {
        "threshold": SETTLED,
        "nodes": nodes.tolist(),
        "reached": shares.tolist(),
        "frontier": (whole.sum(axis=1) - 1).tolist(),
    }
