"""What docstrings say, as Markdown: of the fields of dataclasses, and of functions."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

SECTIONS = ("Args:", "Returns:", "Raises:", "Attributes:")


@functools.cache
def field_docstrings(kind: type) -> Mapping[str, str]:
    """Field -> the string behind it in the class, or in the class that it comes from; on one line."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except (OSError, TypeError):  # has no source, such as Generic
            continue
        assert isinstance(body, ast.ClassDef)
        for field, after in itertools.pairwise(body.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = one_line(str(after.value.value))
    return found


def one_line(text: str) -> str:
    """A docstring without its line breaks."""
    return " ".join(text.split())


def prose(text: str) -> str:
    """Text of a docstring or of a help as Markdown on one line, fit for a cell; what stands in backticks stays code."""
    parts = re.split(r"(`[^`]*`)", one_line(text))
    return "".join(part.replace("|", "\\|") if at % 2 else _escaped(part) for at, part in enumerate(parts)) or "-"


def _escaped(text: str) -> str:
    """Plain text without Markdown's signs; a page of docs/ that it names becomes a link."""
    text = re.sub(r"([|*_\[\]])", r"\\\1", text).replace("<", "&lt;")
    return re.sub(r"docs/([a-z\\_]+)\.md", lambda found: f"[{found[1]}](../{found[1].replace(chr(92), '')}.md)", text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def type_name(annotation: Any) -> str:
    """An annotation as people write values of it."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if annotation == tuple[int, ...]:
        return "integers, such as `2` or `[4, 4]`"
    if get_origin(annotation) is dict:
        return "names and values"
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return " or ".join(type_name(each) for each in get_args(annotation))
    names = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def value_text(value: Any) -> str:
    """A default as it would be written in a file."""
    if value is dataclasses.MISSING:
        return "none"
    if isinstance(value, str):
        return f"`{value}`".replace("\n", "\\n") if value else "empty"
    if isinstance(value, bool):
        return f"`{value}`".lower()
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def docstring(thing: Any) -> str:
    """A function's or class's docstring as Markdown: paragraphs, then its arguments and errors as lists."""
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    text = re.sub(r"docs/([a-z_]+)\.md", r"[\1](../\1.md)", text)
    out: list[str] = []
    for line in text.splitlines():
        named = re.match(r" {4}(\w[\w, ]*): (.*)", line)
        if line in SECTIONS:
            out += ["", f"**{line.removesuffix(':')}**", ""]
        elif named:
            out.append(f"- {', '.join(f'`{each}`' for each in named[1].split(', '))}: {named[2]}")
        else:  # text, or the next line of an argument
            out.append(f"  {line.strip()}" if out and out[-1].startswith(("- ", "  ")) and line else line.strip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"
