"""Strict reading of JSONL files, and the templates that make a prompt and a completion of a record."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from dreamer_jax.data.records import Record
from dreamer_jax.errors import ConfigError, UserError

_TEMPLATE_PART = re.compile(r"\{\{|\}\}|\{[^{}]+\}|[{}]|[^{}]+")


class Broken(Exception):
    """A record that can't be used.

    Args:
        kind: what is wrong, for counting.
        detail: the same for a person, after "record 3".
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


class Template:
    """Text with {name} for fields of a record; {{ and }} stand for braces. Nothing else is interpreted.

    {messages.1.content} goes into lists and objects where the record has no field of just that name, and {hints.*} is
    all texts of a list, a line each (or the text, where it is one).

    Args:
        text: the template.
        key: the configuration key it comes from, for messages.
        names: name in the template -> field of the record, where the two differ.

    Raises:
        ConfigError: a brace stands alone.
    """

    def __init__(self, text: str, key: str, names: Mapping[str, str] | None = None):
        self._parts: list[tuple[bool, str]] = []  # (is a field, its name or the literal text)
        for part in _TEMPLATE_PART.findall(text):
            if part in ("{", "}"):
                raise ConfigError(
                    f"{key}: a lone {part} in {text!r}; fields are written {{name}}, and a brace itself {part * 2}",
                    key=key,
                )
            if part in ("{{", "}}"):
                self._parts.append((False, part[0]))
            elif part.startswith("{"):
                name = part[1:-1]
                self._parts.append((True, names.get(name, name) if names else name))
            else:
                self._parts.append((False, part))
        self._key = key

    @property
    def fields(self) -> list[str]:
        """Names of the fields, in order."""
        return [text for is_field, text in self._parts if is_field]

    @property
    def constant(self) -> str:
        """The text without the fields."""
        return "".join(text for is_field, text in self._parts if not is_field)

    def fill(self, record: dict[str, object]) -> str:
        """The text with the record's fields put in (never interpreted as a template again)."""
        return "".join(self._field(record, text) if is_field else text for is_field, text in self._parts)

    def _field(self, record: dict[str, object], name: str) -> str:
        value = record[name] if name in record else _descend(record, name)
        if value is _ABSENT:
            has = ", ".join(list(record)[:8]) or "none"
            raise Broken("without a field", f"has no field {name!r}, which {self._key} names (its fields: {has})")
        if not isinstance(value, str):
            raise Broken("with a field that isn't text", f"field {name!r} is {_json_type(value)}, not a string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Broken("not valid Unicode", f"field {name!r} holds half of a surrogate pair") from None
        return value


class JsonlReader:
    """Records of a JSONL file, as prompt and completion.

    Args:
        path: the file, perhaps .gz; blank lines are skipped and not counted as records.
        key: the configuration key that names the file, for messages.
        prompt, completion: templates.
        on_error: "stop" raises at the first broken record; "skip" counts it in `skipped` and goes on.
    """

    def __init__(self, path: Path, key: str, prompt: Template, completion: Template, on_error: Literal["stop", "skip"]):
        self._path = path
        self._key = key
        self._prompt = prompt
        self._completion = completion
        self._on_error = on_error
        self.skipped: Counter[str] = Counter()
        """Broken records left out so far, by kind."""

    def __iter__(self) -> Iterator[Record]:
        """Read the file once, a line at a time.

        Raises:
            UserError: the file is missing, unreadable or empty; a record is broken (its number and line are named),
                or with "skip" all of them are.
        """
        self.skipped.clear()
        number, good, first_problem = 0, 0, ""
        for line_number, line in enumerate(self._lines(), start=1):
            if not line.strip():
                continue
            number += 1
            try:
                record = self._parse(line)
            except Broken as broken:
                problem = f"{self._path}: record {number} (line {line_number}): {broken}"
                if self._on_error == "stop":
                    raise UserError(
                        f"{problem}; mend it, or leave out broken records with --data.on_error skip"
                    ) from None
                self.skipped[broken.kind] += 1
                first_problem = first_problem or problem
                continue
            good += 1
            yield record
        if not number:
            raise UserError(f"{self._path}: is empty; {self._key} needs one JSON object a line")
        if not good:
            raise UserError(f"{self._path}: all of its records are broken ({number}). The first: {first_problem}")

    def _lines(self) -> Iterator[bytes]:
        try:
            with gzip.open(self._path) if self._path.suffix == ".gz" else self._path.open("rb") as file:
                first = file.readline()
                if first:
                    yield first.removeprefix(b"\xef\xbb\xbf")
                yield from file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{self._key}: {self._path} is not a whole gzip file ({error}); fetch it again") from None
        except FileNotFoundError:
            raise UserError(f"{self._key}: {self._path} does not exist (seen from {Path.cwd()})") from None
        except OSError as error:
            raise UserError(f"{self._key}: can't read {self._path}: {error.strerror}") from None

    def _parse(self, line: bytes) -> Record:
        value = parse_object(line)
        return Record(self._prompt.fill(value), self._completion.fill(value))


def parse_object(line: bytes) -> dict[str, object]:
    """The JSON object of a line.

    Raises:
        Broken: it isn't UTF-8, JSON or an object.
    """
    try:
        text = line.decode("utf-8").rstrip("\r\n")  # behind it JSON would count columns of a next line
    except UnicodeDecodeError as error:
        raise Broken("not valid UTF-8", f"is not valid UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Broken("not JSON", f"is not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise Broken("not JSON", f"is not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise Broken("not an object", f"is {_json_type(value)}, not an object with fields")
    return value


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


_ABSENT = object()


def _descend(value: object, path: str) -> object:
    """What `a.1.b` or `a.*` names inside objects and lists, or _ABSENT."""
    for part in path.split("."):
        if part == "*":
            if isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
                value = "\n".join(value)
        elif isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value
