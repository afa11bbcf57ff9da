"""Numbers that stand on two pages are the same on both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rows_of(text: str) -> dict[str, list[str]]:
    """First word of a table's row -> its other cells."""
    found = {}
    for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        first, *rest = [cell.strip() for cell in line.split("|")]
        if first and set(first) != {"-"}:
            found.setdefault(re.split(r"[ ,]", first)[0], rest)
    return found


def test_the_comparison_of_the_readme_is_the_recorded_one():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A comparison")[2].partition("\n## ")[0]
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8").partition("<!-- from results/zoo.json -->")[2]
    recorded, shown = rows_of(results), rows_of(readme)
    assert next(iter(shown)) == "model" and len(shown) == 5
    for name, cells in shown.items():
        if name != "model":
            assert len(cells) == 3 and set(cells) <= set(recorded[name])


def test_what_the_readme_says_of_more_depth_is_recorded():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (fewer,) = re.findall(r"DR\+DA needs ([\d.]+) times fewer tokens than LA", readme)
    ((la, dr_da),) = re.findall(r"LA \(([\d.]+)\) is ahead of DR\+DA \(([\d.]+)\)", readme)
    (chains,) = re.findall(r"told its depth needs ([\d.]+) times fewer tokens than LA", readme)
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    depth32, scaled, steps = (
        rows_of(results.partition(f"<!-- from results/{name}.json -->")[2].partition(f"**{task}**")[2])
        for name, task in (("depth32", "text"), ("scaled32", "text"), ("steps16", "arithmetic"))
    )
    for said, recorded in (
        (fewer, depth32["dr_da"][-1]),
        (la, scaled["la_scaled"][-2]),
        (dr_da, scaled["dr_da_scaled"][-2]),
        (chains, steps["dr_da_looped"][-1]),
    ):
        assert round(float(recorded.split()[0]), len(said.partition(".")[2])) == float(said)


RANGES = {
    ("depth attention", 0): ("depth_attention", "forward"),
    ("depth attention", 1): ("depth_attention", "backward"),
    ("sequence attention", 0): ("sequence_attention", "forward"),
    ("sequence attention", 1): ("sequence_attention", "gradient"),
    ("expert MLP", 0): ("expert_mlp", "forward"),
    ("attention MoE", 0): ("expert_linear", "forward"),
    ("attention MoE", 1): ("expert_linear", "gradient"),
}
"""Row and column of the summary of docs/kernels.md -> kernel and direction in its tables."""


@pytest.mark.parametrize(("place", "kernel"), RANGES.items(), ids=[" ".join(each) for each in RANGES.values()])
def test_the_summary_of_kernels_is_the_tables(place, kernel):
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    summary = page.partition("| operation | XLA's time over ours")[2].partition("\n\n")[0]
    (cells,) = re.findall(rf"^\| {re.escape(place[0])} \| (.+) \| (.+) \|$", summary, re.MULTILINE)
    lines = re.findall(rf"^{kernel[0]} +{kernel[1]} .*$", page, re.MULTILINE)
    ratios = [float(line.split()[-2]) for line in lines]
    assert len(lines) >= 3 and cells[place[1]].startswith(f"{min(ratios):.2f} to {max(ratios):.2f}")
