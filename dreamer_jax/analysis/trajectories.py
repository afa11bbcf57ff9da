"""Where single tokens go in the state space: their paths, its principal components, and what kind of path each is.

Geiping et al. (2025, section 7) draw the states of some tokens in the plane of their first principal components, and
find states that converge to a fixed point, that orbit, and that slide in one direction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.analysis.convergence import SETTLED, change, steps_to_settle
from dreamer_jax.data import Tokenizer
from dreamer_jax.families import Family, forward

DOCUMENTS, TOKENS = 4, 6
"""Documents that are looked at, the first of the sample, and tokens of each, spread evenly from its second to its last.
The first sees only itself and is the same in most of them."""
DEEPER, DEEPEST = 4, 64
"""A recurrent model goes so many times as deep as it was trained, but no deeper than that many steps."""
COMPONENTS = 6
"""Principal components that are kept."""
STRAIGHT = 0.8
"""A slider's way from start to end, over the length of its path."""
RETURN = 0.5
"""What comes back gets this much nearer than it has been."""

Trajectories = dict[str, Any]


def trajectories(
    family: Family, params: Any, model_state: Any, batch: Mapping[str, np.ndarray], tokenizer: Tokenizer
) -> Trajectories:
    """The paths of some tokens of a batch, as numbers and lists that JSON can hold.

    Returns:
        `depth` D. `explained` [COMPONENTS or fewer]: shares of the variance of all states of all chosen tokens that
        their first principal components explain. `tokens`, a list; of each `document` and `position` (from 0), `token`,
        `text`, `steps` (to settle), `kind` (see `kind_of`), `norm` [D+1], `change` and `cosine` [D] of a state and the
        one before, and `components` [D+1, COMPONENTS or fewer], where each state is.
    """
    depth = max(family.depth, min(DEEPER * family.depth, DEEPEST)) if family.flags.recurrent else family.depth
    documents, rows, columns = choose_tokens(batch["segment_ids"])
    used, rows = np.unique(rows, return_inverse=True)
    part = {name: values[used] for name, values in batch.items()}
    on_device = _states(family, depth, params, model_state, part, rows, columns)
    changes = change(on_device[:-1], on_device[1:])
    steps, states = steps_to_settle(changes), np.asarray(on_device)
    points, explained = principal_components(states)
    tokens = []
    for t, (document, row, column) in enumerate(zip(documents, rows, columns, strict=True)):
        token, path = int(part["tokens"][row, column]), states[:, t]
        norms = np.linalg.norm(path, axis=-1)
        cosines = np.sum(path[1:] * path[:-1], axis=-1) / np.maximum(norms[1:] * norms[:-1], 1e-30)
        place = {"document": int(document), "position": int(part["positions"][row, column])}
        said = {"token": token, "text": tokenizer.decode([token])}
        found = {"steps": int(steps[t]), "kind": kind_of(path)}
        by_step = {"norm": norms, "change": changes[:, t], "cosine": cosines, "components": points[:, t]}
        tokens.append(place | said | found | {name: values.tolist() for name, values in by_step.items()})
    return {"depth": depth, "explained": explained.tolist(), "tokens": tokens}


def choose_tokens(segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(documents, rows, columns) [T] of up to TOKENS tokens of each of the first DOCUMENTS documents.

    Args:
        segment_ids: [B, S], 0 for padding.
    """
    chosen: list[tuple[int, int, int]] = []
    named = [(row, segment) for row, ids in enumerate(segment_ids) for segment in np.unique(ids[ids > 0])]
    for document, (row, segment) in enumerate(named[:DOCUMENTS]):
        columns = np.flatnonzero(segment_ids[row] == segment)
        columns = columns[len(columns) > 1 :]
        spread = np.linspace(0, len(columns) - 1, min(TOKENS, len(columns))).round().astype(int)
        chosen += [(document, row, column) for column in columns[spread]]
    documents, rows, columns = np.array(chosen).T
    return documents, rows, columns


@functools.partial(jax.jit, static_argnums=(0, 1))
def _states(family: Family, depth: int, params: Any, model_state: Any, batch: Any, rows: Any, columns: Any):
    """The residual stream [depth + 1, T, h] float32 of chosen places, before the first depth and after each."""

    def observe(step):
        def seen(weights, state, *rest):
            return step(weights, state, *rest)._replace(counts=family.stream(state)[rows, columns])

        return seen

    passed = forward(family, family.cast(params), model_state, batch, depth, observe=observe)
    last = family.stream(passed.state)[rows, columns]
    return jnp.concatenate([passed.counts, last[None]]).astype(jnp.float32)


def principal_components(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All paths together in the directions in which they vary most.

    Args:
        states: [D+1, T, h].

    Returns:
        Coordinates [D+1, T, C], and the shares [C] of the variance that they explain; C is COMPONENTS or fewer. A
        component's sign is such that its largest coordinate is positive.
    """
    flat = states.reshape(-1, states.shape[-1]).astype(np.float64)
    left, sizes, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    points = (left * sizes)[:, :COMPONENTS]
    points *= np.where(np.abs(points.min(axis=0)) > points.max(axis=0), -1, 1)
    explained = sizes**2 / max(np.sum(sizes**2), 1e-30)
    return points.reshape(*states.shape[:2], -1), explained[:COMPONENTS]


def kind_of(path: np.ndarray) -> str:
    """What the second half of a path looks like, by the first of these rules that holds. A description, not a proof.

    "fixed point": all its states are as close to the last as SETTLED of that one's norm.
    "slider": start and end are at least STRAIGHT of the path's length apart.
    "orbit": it comes back. It goes away from some state, by at least half of the greatest distance of any two, and
    later is closer to that state than RETURN of how far away it has been.
    "other": none of these.

    Args:
        path: [D+1, h], all dimensions, not principal components.
    """
    tail = path[len(path) // 2 :].astype(np.float64)
    apart = np.stack([np.linalg.norm(tail - state, axis=-1) for state in tail])  # [m, m]
    if (apart[-1] <= SETTLED * np.linalg.norm(tail[-1])).all():
        return "fixed point"
    length = np.diagonal(apart, offset=1).sum()
    if apart[0, -1] >= STRAIGHT * length:
        return "slider"
    reach = np.maximum.accumulate(np.triu(apart), axis=1)  # from state i, how far the path has been away until j
    returns = np.triu(apart < RETURN * reach, 1) & (reach >= apart.max() / 2)
    return "orbit" if returns.any() else "other"
