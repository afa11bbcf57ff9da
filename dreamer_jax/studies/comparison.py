"""What a study says: the best of every member, and how many fewer tokens it needs than the baseline (Table 2).

Everything is computed from what study.json holds, so that a table can be made again anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dreamer_jax.evaluation.comparison import Curve, average, best, tokens_to_reach
from dreamer_jax.studies.study_file import LOSS

RESAMPLES = 2000
"""Of the bootstrap."""
INTERVAL = (2.5, 97.5)
"""Percentiles of an interval."""

Interval = tuple[float, float]


class Run(NamedTuple):
    """How good a run was over its tokens, as higher is better: losses are negative.

    Attributes:
        curve: over all that is held out.
        parts: [T, 2, P], for each point of the curve what it is the ratio of, over parts of what is held out; empty
            where that isn't known, as of a benchmark.
    """

    curve: Curve
    parts: np.ndarray = np.zeros((0, 2, 0))

    def over(self, weights: np.ndarray) -> np.ndarray:
        """Values over parts drawn so many times each: [R, P] -> [R, T]."""
        if not self.parts.size:
            return np.tile([value for _, value in self.curve], (len(weights), 1))
        sums = self.parts @ weights.T  # [T, 2, R]
        return np.divide(sums[:, 0], sums[:, 1], out=np.zeros_like(sums[:, 0]), where=sums[:, 1] > 0).T


def seeds_of(member: Mapping[str, Any], metric: str) -> list[Run]:
    """All complete runs of a member."""
    sign = np.array([-1.0 if metric == LOSS else 1.0, 1.0])
    found = []
    for its in member["seeds"].values():
        curve = [(tokens, sign[0] * value) for tokens, value in its["curves"].get(metric, [])]
        parts = np.array(its.get("parts") or np.zeros((0, 2, 0))) * sign[:, None]
        if curve:
            found.append(Run(curve, parts) if len(parts) == len(curve) else Run(curve))
    return found


def advantage(curve: Curve, baseline: Curve) -> float | None:
    """How many times fewer tokens a curve needs than the baseline for the same value, where higher is better.

    Where the curve gets as far as the baseline's best, that is Table 2's data efficiency: tokens of the baseline's best
    over tokens at which the curve reaches it. Where it doesn't, the same is asked from the other side: tokens at which
    the baseline reaches the curve's best, over the curve's; it is below 1 then, but for a curve that was there sooner
    and got no further. None of empty curves, and where one's best is an accuracy of 0, which every curve has reached.
    """
    top, own = best(baseline), best(curve)
    if top is None or own is None or not top[1] or not own[1]:
        return None
    reached = tokens_to_reach(curve, top[1])
    if reached is not None:
        return top[0] / reached
    theirs = tokens_to_reach(baseline, own[1])
    assert theirs is not None  # its best is higher
    return theirs / own[0]


def efficiency(
    member: Sequence[Run], baseline: Sequence[Run], key: int = 0
) -> tuple[float, Interval] | tuple[None, None]:
    """The advantage of the mean curve, with its bootstrap interval over seeds and held-out records.

    `RESAMPLES` times, seeds of the member and of the baseline are drawn with replacement, each on its own: runs of one
    seed share nothing but the order of the data. Parts of the held-out rows are drawn once for all runs, which are all
    evaluated on the same ones.

    Args:
        member, baseline: a run for each seed.
        key: of the draws.

    Returns:
        (None, None) without runs, or where they have nothing in common.
    """
    if not member or not baseline:
        return None, None
    value = advantage(*(average([run.curve for run in its]) for its in (member, baseline)))
    if value is None:  # seeds that were never measured after the same tokens
        return None, None
    random = np.random.default_rng(key)
    member, baseline = _of_filled_parts(member, baseline)
    parts = max(run.parts.shape[2] for run in (*member, *baseline))
    weights, picks = [], []
    for _ in range(RESAMPLES):
        weights.append(np.bincount(random.integers(0, parts, parts), minlength=parts) if parts else np.zeros(0))
        picks.append([random.integers(0, len(its), len(its)) for its in (member, baseline)])
    curves = [
        _means(its, np.array(weights), np.array(chosen))
        for its, chosen in zip((member, baseline), zip(*picks, strict=True), strict=True)
    ]
    # A draw of seeds that learn nothing has no factor where the baseline's do: it is as far behind as can be.
    drawn = [0.0 if _learns_nothing(*pair) else advantage(*pair) for pair in zip(*curves, strict=True)]
    ends = np.percentile([each for each in drawn if each is not None], INTERVAL)
    return value, (float(ends[0]), float(ends[1]))


def _learns_nothing(curve: Curve, baseline: Curve) -> bool:
    """Whether its accuracy stays 0 where the baseline's doesn't."""
    own, theirs = best(curve), best(baseline)
    return own is not None and theirs is not None and own[1] == 0 and theirs[1] > 0


def _of_filled_parts(*of_members: Sequence[Run]) -> list[list[Run]]:
    """The runs without the parts that nothing is held out in: a draw of only those would be a loss of zero."""
    known = [run.parts[:, 1] > 0 for runs in of_members for run in runs if run.parts.size]
    filled = np.any(np.concatenate(known), axis=0) if known else np.zeros(0, np.bool_)
    return [
        [run._replace(parts=run.parts[:, :, filled]) if run.parts.size else run for run in its] for its in of_members
    ]


def _means(runs: Sequence[Run], weights: np.ndarray, picks: np.ndarray) -> list[Curve]:
    """The mean curve of each draw, where all runs were measured: weights of parts [R, P], picked runs [R, n].

    Sums are exact, so that values which are equal stay so in whatever order they are added.
    """
    shared = sorted(set.intersection(*({tokens for tokens, _ in run.curve} for run in runs)))
    values = []
    for run in runs:
        places = {tokens: t for t, (tokens, _) in enumerate(run.curve)}
        values.append(run.over(weights)[:, [places[tokens] for tokens in shared]])
    picked = np.stack(values, 1)[np.arange(len(picks))[:, None], picks]  # [R, n, T]
    return [
        [(tokens, math.fsum(its) / len(its)) for tokens, *its in zip(shared, *curves, strict=True)]
        for curves in picked.tolist()
    ]


def best_of(curves: Sequence[Curve], metric: str) -> tuple[float, Interval] | None:
    """(mean, (worst, best)) over seeds of the best value of each, as it was measured."""
    sign = -1.0 if metric == LOSS else 1.0
    tops = [sign * top[1] for top in map(best, curves) if top]
    return (math.fsum(tops) / len(tops), (min(tops), max(tops))) if tops else None


def rows_of(result: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """A row for each member: costs, speed, best value, and data efficiency; None where the baseline wasn't trained."""
    its = result["tasks"][task]
    metric, members = its["metric"], its["members"]
    theirs = seeds_of(members[result["baseline"]], metric) if result["baseline"] in members else []
    rows = []
    for name, member in members.items():
        runs = seeds_of(member, metric)
        value, interval = (1.0, None) if name == result["baseline"] and runs else efficiency(runs, theirs)
        seeds = member["seeds"].values()
        speeds = [seed["tokens_per_second"] for seed in seeds if "tokens_per_second" in seed]
        rows.append(
            {
                "member": name,
                "parameters": member["parameters"],
                "flops_per_token": member["flops_per_token"],
                "training_flops_per_token": member["training_flops_per_token"],
                "memory_bytes": member["memory_bytes"],
                "tokens_per_second": math.fsum(speeds) / len(speeds) if speeds else None,
                "seeds": len(runs),
                "best": best_of([run.curve for run in runs], metric),
                "efficiency": value,
                "interval": interval,
            }
        )
    return rows


def header(metric: str) -> list[str]:
    """The headings of `cells`."""
    measured = "held-out loss" if metric == LOSS else f"{metric} accuracy"
    costs = ["member", "parameters", "FLOPs/token", "training FLOPs/token", "memory", "tokens/s"]
    return [*costs, "seeds", measured, "data efficiency"]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of `rows_of` as text."""

    def count(number: float | None) -> str:
        return "-" if number is None else f"{number:,.0f}"

    measured, factor = "-", "-"
    if row["best"]:
        mean, (low, high) = row["best"]
        measured = f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if row["seeds"] > 1 else "")
    if row["efficiency"] is not None:
        between = row["interval"]
        factor = f"{row['efficiency']:.2f}"
        factor += f" ({between[0]:.2f} to {between[1]:.2f})" if between and row["seeds"] > 1 else ""
    return [
        row["member"],
        count(row["parameters"]),
        f"{row['flops_per_token'] / 1e6:.2f} M",
        f"{row['training_flops_per_token'] / 1e6:.2f} M",
        f"{row['memory_bytes'] / 2**20:.2f} MiB",
        count(row["tokens_per_second"]),
        str(row["seeds"]),
        measured,
        factor,
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of a study, for a page."""
    blocks = []
    for name, task in result["tasks"].items():
        table = markdown_table(header(task["metric"]), [cells(row) for row in rows_of(result, name)])
        blocks += [f"**{name}** ({task['tokens']:,} tokens)", table]
        blocks += filter(None, (sweep_table(task), depth_table(task), difficulty_table(task), gini_table(task)))
    return "\n\n".join(blocks) + "\n"


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *rows))


def sweep_table(task: Mapping[str, Any]) -> str:
    """Held-out loss at the end of a sweep's runs, those that went on marked; empty without a sweep."""
    swept = {name: its for name, its in task["members"].items() if its.get("swept")}
    if not swept:
        return ""
    values = swept_values(swept.values())
    lines, keys = [], set()
    for name, its in swept.items():
        ((key, best),) = its["chosen"].items()
        shown = {value: "diverged" if loss is None else f"{loss:.3f}" for value, loss in its["swept"].items()}
        shown[best] = f"**{shown[best]}**"
        lines.append([name, *(shown.get(value, "-") for value in values)])
        keys.add(key)
    return markdown_table([f"loss by `{', '.join(sorted(keys))}`", *values], lines)


def swept_values(members: Iterable[Mapping[str, Any]]) -> list[str]:
    """What any of the members tried, as written; numbers in their order."""
    values = list(dict.fromkeys(value for its in members for value in its["swept"]))
    try:
        return sorted(values, key=float)
    except ValueError:
        return values


def depth_table(task: Mapping[str, Any]) -> str:
    """Held-out loss by depth, means over seeds; empty where nothing was measured."""
    found = {name: depth_means(member) for name, member in task["members"].items() if member["seeds"]}
    depths = sorted({depth for its in found.values() for depth in its})
    if not depths:
        return ""
    lines = []
    for name, its in found.items():
        trained = task["members"][name]["depth"]
        shown = (f"{its[d]:.3f}" if d in its else "-" for d in depths)
        marked = [f"**{text}**" if d == trained else text for d, text in zip(depths, shown, strict=True)]
        lines.append([name, *marked])
    return markdown_table(["loss at depth", *map(str, depths)], lines)


def difficulty_table(task: Mapping[str, Any]) -> str:
    """Right answers by difficulty, a line for each depth, means over seeds; empty where nobody was asked."""
    lines: list[list[str]] = []
    asked: list[str] = []
    for name, member in task["members"].items():
        tables = [its["by_difficulty"] for its in member["seeds"].values() if "by_difficulty" in its]
        if not tables:
            continue
        places = [place.split("/") for place in tables[0]]
        asked = list(dict.fromkeys([*asked, *(level for level, _ in places)]))
        for depth in dict.fromkeys(depth for _, depth in places):
            shares = {level: [table.get(f"{level}/{depth}") for table in tables] for level in asked}
            cells = [f"{math.fsum(its) / len(its):.3f}" if None not in its else "-" for its in shares.values()]
            shown = f"**{depth}**" if int(depth) == member["depth"] else depth
            lines.append([name, shown, *cells])
    if not lines:
        return ""
    header = ["right at difficulty", "depth", *asked]
    return markdown_table(header, [line + ["-"] * (len(header) - len(line)) for line in lines])


def gini_table(task: Mapping[str, Any]) -> str:
    """Gini coefficients of expert use after training by router, means over seeds; empty without experts.

    Fewer tokens give higher ones: of a member's seeds only those count that were counted in the most.
    """
    means: dict[str, dict[str, float]] = {}
    tokens: dict[str, int] = {}
    for name, member in task["members"].items():
        values: dict[str, list[float]] = {}
        counted = [seed for seed in member["seeds"].values() if seed.get("gini")]
        most = max((seed["gini_tokens"] for seed in counted), default=0)
        for seed in counted:
            if seed["gini_tokens"] == most:
                tokens[name] = most
                for router, value in seed["gini"].items():
                    values.setdefault(router, []).append(value)
        means[name] = {router: math.fsum(its) / len(its) for router, its in values.items()}
    routers = sorted({router for its in means.values() for router in its})
    if not routers:
        return ""
    alike = len(set(tokens.values())) == 1
    lines = [
        [name, *(f"{its[r]:.2f}" if r in its else "-" for r in routers), *([] if alike else [f"{tokens[name]:,}"])]
        for name, its in means.items()
        if its
    ]
    title = "Gini of expert use" + (f" in {next(iter(tokens.values())):,} tokens" if alike else "")
    return markdown_table([title, *(f"`{router}`" for router in routers), *([] if alike else ["tokens"])], lines)


def depth_means(member: Mapping[str, Any]) -> dict[int, float]:
    """Depth -> held-out loss, the mean over seeds."""
    tables = [seed["by_depth"] for seed in member["seeds"].values()]
    depths = set.intersection(*(set(table) for table in tables)) if tables else set()
    return {int(depth): math.fsum(table[depth] for table in tables) / len(tables) for depth in depths}
