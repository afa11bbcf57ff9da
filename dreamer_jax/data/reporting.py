"""The report of a preparation: what came in, what each rule changed or dropped, what stayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dreamer_jax.data.filtering import Tally

EXACT_RULE = "exact duplicate"
NEAR_RULE = "near duplicate"
HELDOUT_RULE = "held out"


def merge(units: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Counts by source from the units' done.json, in the order of the units."""
    sources: dict[str, Any] = {
        name: {"read": 0, "read_tokens": 0, "dropped": {}, "changed": {}, "kept": 0, "kept_tokens": 0} for name in names
    }
    for unit in units:
        source = sources[unit["source"]]
        source["read"] += unit["read"]
        source["read_tokens"] += unit["read_tokens"]
        for group in ("dropped", "changed"):
            for rule, counts in unit[group].items():
                source[group].setdefault(rule, Tally()).merge(counts)
    return sources


def finish(sources: dict[str, Any]) -> dict[str, Any]:
    """The report as JSON-ready values, with a sum over the sources.

    Every source's records add up: read = kept + all dropped.
    """
    for source in sources.values():
        for group in ("dropped", "changed"):
            source[group] = {rule: vars(tally) for rule, tally in sorted(source[group].items())}
        gone = sum(tally["records"] for tally in source["dropped"].values())
        assert source["read"] == source["kept"] + gone, "the report's counts must add up"
    total = {key: sum(s[key] for s in sources.values()) for key in ("read", "read_tokens", "kept", "kept_tokens")}
    return {"total": total, "sources": sources}


def table(report: Mapping[str, Any]) -> str:
    """The report as text: a table by source and rule, then examples of what each rule dropped or changed."""
    rows: list[tuple[str, str, str]] = []
    for name, source in report["sources"].items():
        rows.append((name, "", ""))
        rows.append(("  read", f"{source['read']:,}", f"{source['read_tokens']:,}"))
        for group, sign in (("changed", "~"), ("dropped", "-")):
            for rule, tally in source[group].items():
                rows.append((f"  {sign} {rule}", f"{tally['records']:,}", f"{tally['tokens']:,}"))
        rows.append(("  kept", f"{source['kept']:,}", f"{source['kept_tokens']:,}"))
    total = report["total"]
    rows.append(("all", "", ""))
    rows.append(("  read", f"{total['read']:,}", f"{total['read_tokens']:,}"))
    rows.append(("  kept", f"{total['kept']:,}", f"{total['kept_tokens']:,}"))
    head = ("source and rule", "records", "tokens")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in [head, *rows]]
    lines.insert(1, "-" * len(lines[0]))
    note = [
        "",
        "- dropped, with the tokens of the dropped records as they were read; ~ changed, with the tokens saved.",
    ]
    return "\n".join(lines + note + _examples(report)) + "\n"


def _examples(report: Mapping[str, Any]) -> list[str]:
    lines = ["", "Examples"]
    for name, source in report["sources"].items():
        for group in ("changed", "dropped"):
            for rule, tally in source[group].items():
                lines += ["", f"{name}: {group}, {rule}"]
                for example in tally["examples"]:
                    lines.append(f"  {example['where']}")
                    lines.append(f"    {' '.join(example['text'].split())}")
                    if "because" in example:
                        lines.append(f"    -> {' '.join(example['because'].split())}")
    return lines
