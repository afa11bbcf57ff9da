"""docs/record.py: what a study found joins what is recorded, and the page follows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))

import record  # noqa: E402

from dreamer_jax.errors import UserError  # noqa: E402


def result(**tasks: dict) -> dict:
    members = {
        name: {member: {"depth": 1, "seeds": seeds} for member, seeds in its.items()} for name, its in tasks.items()
    }
    return {"baseline": "a", "tasks": {name: {"tokens": 1, "members": its} for name, its in members.items()}}


def test_members_and_tasks_join_what_is_recorded_in_the_order_of_the_file():
    recorded = result(text={"a": {"0": "old"}, "c": {"0": "old"}})
    new = result(text={"b": {"0": "new"}, "c": {"0": "new"}, "a": {}}, boolean={"a": {"0": "new"}}, sums={"a": {}})
    found = record.merged(recorded, new, ["boolean", "text", "sums"], ["a", "b", "c"])
    assert list(found["tasks"]) == ["boolean", "text"]  # sums has no complete run yet
    members = found["tasks"]["text"]["members"]
    assert [(name, its["seeds"]) for name, its in members.items()] == [
        ("a", {"0": "old"}),
        ("b", {"0": "new"}),
        ("c", {"0": "new"}),
    ]


def test_more_seeds_join_those_of_the_same_model():
    old, again = ({"parts": name, "tokens_per_second": 5.0} for name in ("old", "new"))
    added = {"parts": "new"}  # perhaps on another machine: their speed says nothing
    recorded = result(text={"a": {"0": old, "1": old}, "b": {"0": old}})
    recorded["tasks"]["text"]["members"]["a"]["swept"] = {"1e-3": 0.5}
    new = result(text={"a": {"10": again, "3": again, "1": again}, "c": {"3": again}})
    found = record.merged(recorded, new, ["text"], ["a", "b", "c"], more_seeds=True)["tasks"]["text"]["members"]
    assert list(found["a"]["seeds"].items()) == [("0", old), ("1", again), ("3", added), ("10", added)]
    assert found["a"]["swept"] == {"1e-3": 0.5}  # further seeds need no sweep, and its losses stay
    assert found["b"]["seeds"] == {"0": old} and found["c"]["seeds"] == {"3": again}
    new["tasks"]["text"]["members"]["a"]["depth"] = 2
    with pytest.raises(UserError, match="a: what is recorded is another model"):
        record.merged(recorded, new, ["text"], ["a", "b", "c"], more_seeds=True)


def test_another_study_and_a_quick_one_are_refused():
    recorded, quick = result(text={"a": {"0": "old"}}), result(text={"a": {"0": "new"}})
    quick["tasks"]["text"]["tokens"] = 16
    for new, said in ((quick, "16 tokens, and what is recorded has 1"), (result(text={"z": {}}), "no z;")):
        with pytest.raises(UserError, match=said):
            record.merged(recorded, new, ["text"], ["a"])


def test_numbers_have_six_digits_and_counts_all_of_theirs():
    found = record.shortened({"curve": [[1228800, 0.123456789]], "name": "x", "seeds": {"0": 0.1}})
    assert found == {"curve": [[1228800, 0.123457]], "name": "x", "seeds": {"0": 0.1}}


def test_a_page_is_written_from_what_is_recorded():
    """One block; that every block is so now is seen in tests/studies/test_results_page.py."""
    page = record.PAGE.read_text(encoding="utf-8")
    end = "<!-- end -->"
    first = page[: page.index(end) + len(end)]
    changed = first.replace("| la | ", "| LA | ", 1)
    assert changed != first == record.page_of(first) == record.page_of(changed)
