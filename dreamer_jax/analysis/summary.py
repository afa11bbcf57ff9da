"""From sums to what analysis.json, the report and TensorBoard hold: averages, distributions, the paper's numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dreamer_jax.analysis.convergence import EDGES, SETTLED
from dreamer_jax.analysis.distributions import expert_numbers
from dreamer_jax.analysis.hops import hop_summary
from dreamer_jax.analysis.observation import Sums
from dreamer_jax.families import Family, build

EXPERTS = "expert_attention"
READ = 10
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Summary = dict[str, Any]


def summarise(config: Any, sums: Sums, model_state: Any) -> Summary:
    """Everything that is reported of a model, as numbers and lists that JSON can hold.

    Args:
        config: the section `model`.
        sums: of `observe_batch`, added up.
        model_state: the model's own; balancing biases are taken from it.

    Returns:
        `model` (variant, depth L, what it predicts, experts), `tokens`.
        `residual`: `norm`, `cosine`, `distance` [L], None after a state that is 0. `lens`: `targets`, `answers`;
        `accuracy`, `answer_accuracy`, `loss` [L]; of a family that injects its inputs and generates `entropy` [L]
        (nats) too.
        `convergence`, of all that inject theirs: `threshold`; `settled` [L+1], tokens by the steps they need to settle,
        the last of them those that don't; `edges` [BINS+1] and `changes` [L, BINS] (shares), how far each step moves
        the state.
        `depth_attention`: `scores` [L, L] and `scores_by_head` [n, L, L], or None; 0 at depths that have none.
        `routers`, name -> `counts` [L, E], `entropy` [L] and `largest_entropy` (nats; None at depths without the
        router), `score_histogram` [L, BINS] (shares), `bias` (quantiles); and `experts`, see `expert_numbers`, of
        models that have some.
        `slots`, of models with parameter attention, see `_slots`.
        `hops`, of graphs, see `hop_summary`.
        `observed`: averages over the tokens, [L], of what else the family's blocks saw, where there is something; or
        over some of them (`Family.observed_over`), None where there are none.
    """
    family, tokens = build(config), int(sums["tokens"])
    attention = None
    if "depth_scores" in sums:
        by_head = np.swapaxes(sums["depth_scores"], 0, 1) / max(1, tokens)  # [n, L, L]
        attention = {"scores": by_head.mean(axis=0).tolist(), "scores_by_head": by_head.tolist()}
    summary: Summary = {"model": _model(config), "tokens": tokens}
    counts = sums.get("counts", {})
    if EXPERTS in counts:
        summary["experts"] = expert_numbers(counts[EXPERTS], family.flags.recurrent)
    bias = model_state.get("balancing", {})
    summary["routers"] = {
        name: _router(name, sums, bias.get(name), tokens, family.choices(name, table.shape[1]))
        for name, table in counts.items()
    }
    summary["depth_attention"] = attention
    summary["residual"] = {name: _finite(sums[name] / max(1, tokens)) for name in RESIDUAL}
    summary["lens"] = _lens(sums)
    if "settled" in sums:
        summary["convergence"] = {
            "threshold": SETTLED,
            "settled": sums["settled"].tolist(),
            "edges": EDGES.tolist(),
            "changes": (sums["changes"] / max(1, tokens)).tolist(),
        }
    if "slot_scores" in sums:
        summary["slots"] = _slots(sums["slot_scores"] / max(1, tokens))
    if "hop_nodes" in sums:
        summary["hops"] = hop_summary(sums["hop_reached"], sums["hop_nodes"])
    others = {name: _average(name, sums, tokens, family) for name in sums if name not in KNOWN}
    return summary | ({"observed": others} if others else {})


def _average(name: str, sums: Sums, tokens: int, family: Family) -> list[Any]:
    over = family.observed_over.get(name)
    if over is None:
        return (sums[name] / max(1, tokens)).tolist()
    return [float(its / count) if count else None for its, count in zip(sums[name], sums[over], strict=True)]


def _finite(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON has them."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


RESIDUAL = ("norm", "cosine", "distance")
KNOWN = {
    *RESIDUAL,
    *("tokens", "lens_loss", "lens_correct", "lens_answers_correct", "lens_targets", "lens_answers", "lens_entropy"),
    *("settled", "changes", "hop_reached", "hop_nodes"),
    *("counts", "scores", "entropy", "depth_scores", "slot_scores"),
}
"""Sums that have a place of their own in a summary."""


def _model(config: Any) -> dict[str, Any]:
    family = build(config)
    described = {"variant": getattr(config, "variant", config.family), "depth": family.depth}
    described["predicts"] = "next token" if family.flags.generates else "answer"
    names = {"experts": "num_experts", "experts_per_token": "experts_per_token"}
    return described | {name: getattr(config, key) for name, key in names.items() if hasattr(config, key)}


def _router(name: str, sums: Sums, bias: Any, tokens: int, choices: int) -> dict[str, Any]:
    """Of a router that may choose among so many experts at each depth."""
    counts, scores = sums["counts"][name], sums["scores"][name]
    absent = (counts.sum(axis=1) == 0) & (sums["entropy"][name] == 0)
    return {
        "counts": counts.tolist(),
        "entropy": _finite(np.where(absent, np.nan, sums["entropy"][name] / max(1, tokens))),
        "largest_entropy": math.log(choices),
        "score_histogram": (scores / np.maximum(scores.sum(axis=1, keepdims=True), 1)).tolist(),
        "bias": {f"{q:.0%}": float(np.quantile(np.asarray(bias), q)) for q in QUANTILES} if bias is not None else {},
    }


def _slots(scores: Any) -> dict[str, Any]:
    """Of mean weights [L, n, M]: `count` M; `read` [L], slots of which a token reads more than it would of each if all
    were alike; and `most` [L, READ], the slots that are read most at each depth, the first one most: `slot` from 0, and
    `weight`, the mean over tokens and heads; none at depths without parameter attention."""
    mean = np.asarray(scores).mean(axis=1)  # [L, M]
    order = np.argsort(-mean, axis=1, kind="stable")[:, :READ]
    most = [
        [{"slot": int(i), "weight": float(row[i])} for i in its] if row.any() else []
        for row, its in zip(mean, order, strict=True)
    ]
    return {"count": mean.shape[1], "read": (mean > 1 / mean.shape[1]).sum(axis=1).tolist(), "most": most}


def _lens(sums: Sums) -> dict[str, Any]:
    targets, answers = int(sums["lens_targets"]), int(sums["lens_answers"])
    lens = {
        "targets": targets,
        "answers": answers,
        "accuracy": (sums["lens_correct"] / max(1, targets)).tolist(),
        "answer_accuracy": (sums["lens_answers_correct"] / max(1, answers)).tolist(),
        "loss": (sums["lens_loss"] / max(1, targets)).tolist(),
    }
    if "lens_entropy" in sums:
        lens["entropy"] = (sums["lens_entropy"] / max(1, targets)).tolist()
    return lens


def scalars(summary: Summary) -> dict[str, float]:
    """What TensorBoard and metrics.jsonl get of a summary: names with values, one for each depth where they differ."""
    experts, depth = summary.get("experts", {}), summary["model"]["depth"]
    values = {
        name: experts[name] for name in ("global_gini", "specialised", "generalised", "unused") if name in experts
    }
    by_depth = {f"residual/{name}": row for name, row in summary["residual"].items()}
    by_depth |= {f"experts/{name}": experts[name] for name in ("used", "used_for_90_percent") if name in experts}
    by_depth |= {name: row for name, row in summary.get("observed", {}).items() if np.ndim(row) == 1}
    for name, router in summary["routers"].items():
        by_depth[f"entropy/{name}"] = router["entropy"]
        by_depth[f"score/{name}"] = [_mean_of_bins(row) for row in router["score_histogram"]]
    if "hops" in summary:
        by_depth["hops/frontier"] = summary["hops"]["frontier"]
    by_depth["lens/accuracy"] = summary["lens"]["accuracy"]
    if summary["lens"]["answers"]:
        by_depth["lens/answer_accuracy"] = summary["lens"]["answer_accuracy"]
    if "convergence" in summary:
        settled = np.array(summary["convergence"]["settled"])
        values["convergence/settled"] = settled[:-1].sum() / max(1, settled.sum())
        by_depth |= {f"lens/{name}": summary["lens"][name] for name in ("entropy",) if name in summary["lens"]}
    if summary["depth_attention"]:
        scores = np.array(summary["depth_attention"]["scores"])
        scores[scores.sum(axis=1) == 0] = np.nan  # depths without it
        by_depth["depth_attention/on_itself"] = _finite(np.diag(scores))
        by_depth["depth_attention/on_first"] = _finite(scores[:, 0])
        by_depth["depth_attention/depths_back"] = _finite(np.arange(depth) - scores @ np.arange(depth))
    digits = len(str(depth - 1))
    for name, row in by_depth.items():
        values |= {f"{name}/{l:0{digits}d}": row[l] for l in range(depth) if row[l] is not None}
    return {f"analysis/{name}": float(value) for name, value in values.items()}


def _mean_of_bins(shares: list[float]) -> float | None:
    return float(np.dot(shares, (np.arange(len(shares)) + 0.5) / len(shares))) if any(shares) else None
