"""Repairing text, calculator notes, and traces in every format."""

import time
import unicodedata

import pytest

from dreamer_jax.data.cleaning import Truncated, remove_calculator_notes, repair, strip_traces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no trace, a < b and c > d", "no trace, a < b and c > d"),
        ("<think>well, 2 + 2\n\nis 4</think>\n\nIt is 4.", "It is 4."),
        ("all of this was thought\n</think>\nIt is 4.", "It is 4."),  # the prompt's template held the opening tag
        ("First.\n<think>hm</think>Second.", "First.\nSecond."),
        ("<think>a</think>One.<think>b</think> Two.", "One. Two."),
        ("<think>outer <think>inner</think> still</think>It is 4.", "It is 4."),
        ("<THINK>shouted</Think>It is 4.", "It is 4."),
        (
            "<|begin_of_thought|>\nlong\n<|end_of_thought|>\n\n<|begin_of_solution|>\nIt is 4.\n<|end_of_solution|>",
            "It is 4.",
        ),
        ("<|begin_of_thought|>long<|end_of_thought|>It is 4.", "It is 4."),
        ("long<|end_of_thought|><|begin_of_solution|>It is 4.<|end_of_solution|>", "It is 4."),
        ("<think>only this</think>", ""),
    ],
)
def test_traces_are_stripped(text: str, expected: str) -> None:
    assert strip_traces(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<think>and then it was cut",
        "<think>a</think>It is 4.<think>wait",
        "<think>outer <think>inner</think> and then it was cut",
        "<|begin_of_thought|>and then it was cut",
        "<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>It is",
    ],
)
def test_traces_that_are_cut_short(text: str) -> None:
    with pytest.raises(Truncated):
        strip_traces(text)


def test_calculator_notes() -> None:
    assert remove_calculator_notes("48/2 = <<48/2=24>>24 and 1 < 3, a >> b") == "48/2 = 24 and 1 < 3, a >> b"
    assert remove_calculator_notes("1 << 3\n\na >> b") == "1 << 3\n\na >> b"


def test_repair() -> None:
    assert repair("cafe\u0301 \r\nx\u00b2\u200b = 4\x00\ttab \nend") == "caf\u00e9\nx\u00b2 = 4\ttab\nend"
    assert repair("plain text ") == "plain text "
    assert repair("a\x0bb\x0cc\x85d\u2028e \u2029f\x1cg") == "a\nb\nc\nd\ne\nfg"
    assert repair("e\u200b\u0301") == "\u00e9", "in NFC also where something stood between"
    for text in ("e\u200b\u0301 \x00\r\x0c\n", "x \ufeff\n", "a\u0323\u2060\u0307 \u2028"):
        assert repair(repair(text)) == repair(text) and unicodedata.is_normalized("NFC", repair(text))
    unchanged = "\u221a2 \u2264 \u03c0, \u4f60\u597d\n"
    assert repair(unchanged) == unchanged


def test_a_long_run_of_spaces_takes_no_longer_than_other_text() -> None:
    run = " \t" * 100_000
    began = time.perf_counter()
    assert repair(f"a{run}b\nc{run}\nd") == f"a{run}b\nc\nd"
    assert time.perf_counter() - began < 5
