"""The paper's measures of expert use, from counts alone (section 4.2): NumPy, no model."""

from __future__ import annotations

from typing import Any

import numpy as np

from dreamer_jax.blocks.usage import gini

COVERED = 0.9
"""Share of an expert's selections that its "top 90th percentile" of depths holds."""
GENERALISED = 0.2
"""An expert whose selections need more than this share of the depths counts as generalised."""


def depth_given_expert(counts: np.ndarray) -> np.ndarray:
    """P(depth | expert) [L, E] from counts [L, E]; columns sum to 1, those of unused experts are 0."""
    return counts / np.maximum(counts.sum(axis=0, keepdims=True), 1)


def expert_given_depth(counts: np.ndarray) -> np.ndarray:
    """P(expert | depth) [L, E] from counts [L, E]; rows sum to 1."""
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def depths_needed(counts: np.ndarray) -> np.ndarray:
    """[E] int: the fewest depths that hold 90 % of an expert's selections; 0 for an unused expert.

    The paper's "number of depths in the top 90th percentile of sorted P(depth|expert)".
    """
    return _needed(np.asarray(counts).T, COVERED)


def experts_needed(counts: np.ndarray) -> np.ndarray:
    """[L] int: the fewest experts that hold 90 % of a depth's selections."""
    return _needed(np.asarray(counts), COVERED)


def _needed(table: np.ndarray, share: float) -> np.ndarray:
    """[R] int: how many of the largest counts of each row [R, C] reach a share of its sum."""
    held = np.cumsum(-np.sort(-table, axis=1), axis=1)
    # Counts are integers: half a selection of slack keeps 90 % of 10 from being 9.000000000000002.
    enough = held >= share * table.sum(axis=1, keepdims=True) - 1e-6
    return np.where(table.sum(axis=1) > 0, np.argmax(enough, axis=1) + 1, 0)


def expert_order(counts: np.ndarray, seed: int = 0) -> np.ndarray:
    """[E] int, the order of Figs. 5 and 7: by depths needed, then by one depth drawn from P(depth | expert)."""
    cumulative = np.cumsum(depth_given_expert(counts), axis=0)
    draws = np.random.default_rng(seed).random(counts.shape[1])
    drawn = np.minimum(np.sum(cumulative <= draws, axis=0), len(counts) - 1)
    return np.lexsort((drawn, depths_needed(counts)))


def lorenz(counts: np.ndarray, experts: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The curve of Fig. 6: portion of the routings (x) that a portion of the experts (y) takes, busiest first.

    Args:
        counts: [E].
        experts: what the portion of experts is of; E by default. For a layer of LA all layers' experts together.

    Returns:
        x and y, [U + 1] for the U experts that were used, from (0, 0); y = x E / experts if all are used equally.
    """
    used = -np.sort(-counts[counts > 0])
    x = np.concatenate([[0], np.cumsum(used)]) / max(1, used.sum())
    return x, np.arange(len(x)) / (experts or len(counts))


def expert_numbers(counts: np.ndarray, recurrent: bool) -> dict[str, Any]:
    """The numbers in the paper's text, of the expert attention.

    Args:
        counts: [L, E], selections by depth and expert.
        recurrent: DR, whose depths share the E experts; otherwise each of the L layers has E of its own.

    Returns:
        Of both: `experts` (of the whole model), `global_gini`, `used` and `used_for_90_percent`, [L], experts selected
        at each depth, at all or for 90 % of its selections.
        Of DR also: `against_la` (the same as `used`, in multiples of the experts/L a layer of LA would have) and
        `against_la_90_percent` (of 0.9 experts/L: a perfectly balanced layer's), shares of all experts: `specialised`
        (one or two depths needed), `specialised_deep` (those of them most used in the deeper half), `generalised`
        (more than 20 % of the depths needed), `unused`; `dedicated` [L], experts whose 90 % are at that one depth.
    """
    depths, width = counts.shape
    experts = width if recurrent else width * depths
    used = np.sum(counts > 0, axis=1)
    needed_experts = experts_needed(counts)
    numbers: dict[str, Any] = {
        "experts": experts,
        "global_gini": gini(counts.sum(axis=0) if recurrent else counts.reshape(-1)),
        "used": used.tolist(),
        "used_for_90_percent": needed_experts.tolist(),
    }
    if not recurrent:
        return numbers
    needed = depths_needed(counts)
    favourite = np.argmax(counts, axis=0)
    specialised = (needed == 1) | (needed == 2)
    return numbers | {
        "against_la": (used * depths / experts).tolist(),
        "against_la_90_percent": (needed_experts * depths / (COVERED * experts)).tolist(),
        "specialised": float(np.mean(specialised)),
        "specialised_deep": float(np.mean(specialised & (favourite >= depths / 2))),
        "generalised": float(np.mean(needed > GENERALISED * depths)),
        "unused": float(np.mean(needed == 0)),
        "dedicated": [int(np.sum((needed == 1) & (favourite == depth))) for depth in range(depths)],
    }


def depth_map(scores: np.ndarray) -> np.ndarray:
    """Fig. 4 from average scores [L, L] (depth, attended depth): each row over its largest, NaN for depths to come, and
    in rows of depths without depth attention."""
    largest = scores.max(axis=1, keepdims=True)
    scaled = scores / np.maximum(largest, 1e-30)
    return np.where((np.tril(np.ones_like(scores)) > 0) & (largest > 0), scaled, np.nan)
