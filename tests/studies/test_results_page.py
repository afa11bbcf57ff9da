"""The tables of docs/results.md that come from studies are those of the recorded results, number by number."""

import ast
import json
import math
import operator
import re
from pathlib import Path

import pytest

from dreamer_jax.studies import comparison, frontier_tables
from dreamer_jax.studies.published import PUBLISHED, TABLE_1

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


# Sentences say what stands in the tables of their section, or what follows from tables of the page and from what the
# paper of the frontier reports. The latter is written down near to where it is said: <!-- 0.04 = 3.786 - 3.749 -->.

SECTIONS = {section.split("\n")[0]: section for section in re.split(r"\n(?=## )", PAGE)[1:]}
DERIVED = re.compile(r"<!-- ([^<>]*?=[^<>]*?) -->", re.DOTALL)
MEASURED = re.compile(r"(?<![\w.,/-])(\d+\.\d+|\d+(?=(?: to \d+)? %))(?![\w.]*\d)")
"""Numbers with decimals, and percentages."""
PAPER = [
    *(share for figure in PUBLISHED.values() for row in figure.accuracy.values() for share in row),
    *(share for its in TABLE_1.values() for share in its.values()),
]
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def tables(text: str) -> list[float]:
    cells = re.findall(
        r"(?<![\w.])\d[\d,]*(?:\.\d+)?", "\n".join(line for line in text.splitlines() if line[:1] == "|")
    )
    return [float(cell.replace(",", "")) for cell in cells]


def sentences(section: str) -> str:
    """A section without tables, code, comments, addresses and numbers of sections of papers."""
    text = "\n".join(line for line in section.splitlines() if line[:1] != "|")
    for pattern in (r"```.*?```", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)", r"[Ss]ections? [\d.]+"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    return text


def rounds_to(value: float, written: str) -> bool:
    places = len(written.partition(".")[2])
    return abs(value - float(written)) <= 0.5 * 10**-places + 1e-9


def derived(section: str) -> dict[str, str]:
    """Number -> what it follows from."""
    found: dict[str, str] = {}
    for comment in DERIVED.findall(section):
        for line in comment.split(";"):
            number, _, expression = line.partition("=")
            found[number.strip()] = expression.strip()
    return found


def computed(node: ast.AST, known: list[float]) -> float:
    """The value of + - * / and exp of whole numbers and of numbers that stand in tables."""
    if isinstance(node, ast.Expression):
        return computed(node.body, known)
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](computed(node.left, known), computed(node.right, known))
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name) and node.func.id == "exp"
        return math.exp(computed(node.args[0], known))
    assert isinstance(node, ast.Constant), ast.dump(node)
    assert isinstance(node.value, int) or node.value in known, f"{node.value} is in no table"
    return float(node.value)


@pytest.mark.parametrize("title", SECTIONS)
def test_sentences_say_what_the_tables_say(title: str) -> None:
    section = SECTIONS[title]
    known, reasons = tables(section), derived(section)
    operands = [*tables(PAGE), *PAPER]
    for number, expression in reasons.items():
        value = computed(ast.parse(expression, mode="eval"), operands)
        assert rounds_to(value, number), f"{number} = {expression} is {value:.4f}"
    said = MEASURED.findall(sentences(section))
    wrong = [n for n in said if n not in reasons and not any(rounds_to(value, n) for value in known)]
    assert not wrong, f"neither in a table nor derived: {wrong}"
    assert set(reasons) <= set(said), f"derived and not said: {set(reasons) - set(said)}"
