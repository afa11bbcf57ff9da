"""How evenly routers use their experts, as metrics say it: NumPy, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dreamer_jax.blocks.expert_subsets import even_share


def gini(counts: np.ndarray) -> float:
    """Gini coefficient of non-negative counts [E]: 0 if all are equal, (E-1)/E if one has everything."""
    n = np.sort(np.asarray(counts, np.float64))
    if n.sum() == 0:
        return 0.0
    rank = np.arange(1, n.size + 1)
    return float(np.sum((2 * rank - n.size - 1) * n) / (n.size * n.sum()))


def expert_use(
    counts: Mapping[str, np.ndarray], recurrent: bool, tables: Mapping[str, np.ndarray | None] | None = None
) -> dict[str, float]:
    """How evenly each router uses its experts in one step.

    Args:
        counts: router name -> [L, E].
        recurrent: DR's depths share one set of experts, so their counts are summed; LA's layers are averaged.
        tables: router name -> [L, E] bool, whether an expert could be selected at a depth; None: all could. An
            expert's use is then compared with its even share, see `even_share`; who has none is left out.

    Returns:
        `experts/<router>/used` (share of the experts selected at least once), `.../gini`, `.../max_over_median`
        (infinite medians, where half the experts are idle, are given as 0).
    """
    result = {}
    for router, table in counts.items():
        rows = np.asarray(table, np.int64)
        eligible = (tables or {}).get(router)
        if eligible is not None:
            rows = _in_even_shares(rows, eligible)[None]
        elif recurrent:
            rows = rows.sum(axis=0, keepdims=True)
        medians = np.median(rows, axis=1)
        load = np.where(medians > 0, rows.max(axis=1) / np.maximum(medians, 1), 0.0)
        prefix = f"experts/{router}"
        result[f"{prefix}/used"] = float(np.mean(rows > 0))
        result[f"{prefix}/gini"] = float(np.mean([gini(row) for row in rows]))
        result[f"{prefix}/max_over_median"] = float(np.mean(load))
    return result


def _in_even_shares(rows: np.ndarray, eligible: np.ndarray) -> np.ndarray:
    """Selections [L, E] summed over depths, as if every expert could be selected equally often; of those that could."""
    total, even = rows.sum(axis=0), even_share(rows, eligible)
    reached = even > 0
    return total[reached] / even[reached] * (total.sum() / reached.sum()) if reached.any() else total


def bias_range(balancing: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`bias/<router>/min` and `.../max` of the balancing biases."""
    result = {}
    for router, bias in balancing.items():
        result[f"bias/{router}/min"] = float(np.min(bias))
        result[f"bias/{router}/max"] = float(np.max(bias))
    return result
