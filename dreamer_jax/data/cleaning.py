"""Repairing text, and taking chain-of-thought traces and calculator notes out of it."""

from __future__ import annotations

import re
import unicodedata

_LINE_BREAK = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\u200b\u2060\ufff9-\ufffb]"  # no text has a use for these
)
_SPACE_AT_LINE_END = re.compile(r"(?<![ \t])[ \t]+(?=\n)")  # begun only where a run begins: else quadratic
_CALCULATOR_NOTE = re.compile(r"<<[^<>\n]*>>")
_THINK = re.compile(r"<(?P<close>/?)think>", re.IGNORECASE)
_THOUGHT = re.compile(r"<\|(?P<edge>begin|end)_of_thought\|>")
_SOLUTION_BEGIN, _SOLUTION_END = "<|begin_of_solution|>", "<|end_of_solution|>"


class Truncated(Exception):
    """A trace or solution that begins and never ends: the record was cut short."""


def repair(text: str) -> str:
    """The text in NFC, with plain line breaks, without control and zero-width characters or spaces at line ends."""
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROL.sub("", _LINE_BREAK.sub("\n", text))
    return unicodedata.normalize("NFC", _SPACE_AT_LINE_END.sub("", text))  # last: what stood between is gone


def remove_calculator_notes(text: str) -> str:
    """The text without GSM8K's `<<48/2=24>>`."""
    return _CALCULATOR_NOTE.sub("", text) if "<<" in text else text


def strip_traces(text: str) -> str:
    """The text without chain of thought.

    Known are `<think>...</think>`, also with only the closing tag (then all before it goes), and
    `<|begin_of_thought|>...<|end_of_thought|>`, after which `<|begin_of_solution|>...<|end_of_solution|>` holds what
    stays. Text without any of these tags comes back unchanged.

    Raises:
        Truncated: a trace or a solution has no end.
    """
    if "<" not in text:
        return text
    stripped = _outside(text, _THINK, lambda match: not match["close"])
    stripped = _outside(stripped, _THOUGHT, lambda match: match["edge"] == "begin")
    if _SOLUTION_BEGIN in stripped or _SOLUTION_END in stripped:
        solution = stripped.rpartition(_SOLUTION_BEGIN)[2]
        if _SOLUTION_END not in solution:
            raise Truncated
        stripped = solution.partition(_SOLUTION_END)[0]
    return stripped if stripped == text else stripped.strip()


def _outside(text: str, tag: re.Pattern[str], opens) -> str:
    """What is outside of the pairs of a tag."""
    kept, last, depth = [], 0, 0
    for match in tag.finditer(text):
        if opens(match):
            if depth == 0:
                kept.append(text[last : match.start()])
            depth += 1
        elif depth > 1:
            depth -= 1
        else:
            if depth == 0:  # a closing tag alone: the opening one was part of the prompt's template
                kept.clear()
            depth = 0
        last = match.end()
    if depth:
        raise Truncated
    return "".join([*kept, text[last:]])
