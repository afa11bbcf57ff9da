"""The tables of docs/results.md that come from studies are those of the recorded results, number by number."""

import json
import re
from pathlib import Path

import pytest

from dreamer_jax.studies import comparison, frontier_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/results.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- from (\S+) -->\n\n(.*?)\n\n<!-- end -->", PAGE, re.DOTALL)


@pytest.mark.parametrize(("name", "written"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_page_has_the_recorded_numbers(name: str, written: str) -> None:
    result = json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))
    made = frontier_tables if "models" in result else comparison
    assert written == made.markdown(result).strip()


def test_every_recorded_result_is_shown() -> None:
    recorded = {f"results/{path.name}" for path in (ROOT / "docs/results").glob("*.json")}
    assert recorded and recorded == {name for name, _ in BLOCKS}
