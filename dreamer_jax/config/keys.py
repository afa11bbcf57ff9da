"""The dotted keys of the schema: their types, the conversion of a written value, and the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dreamer_jax.config.sections import Config
from dreamer_jax.errors import ConfigError

_INTEGER = re.compile(r"[-+]?[0-9](_?[0-9]){0,17}")  # 18 digits fit in 64 bits
INTEGERS = tuple[int, ...]
"""The type of a key that holds one integer or several."""


@functools.cache
def sections() -> types.MappingProxyType[str, type]:
    """Section name -> its dataclass, in the order of the schema."""
    return types.MappingProxyType(get_type_hints(Config))


@functools.cache
def key_types() -> types.MappingProxyType[str, Any]:
    """Dotted key -> its annotation, in the order of the schema."""
    found = {}
    for section, section_type in sections().items():
        hints = get_type_hints(section_type)
        found.update({f"{section}.{f.name}": hints[f.name] for f in dataclasses.fields(section_type)})
    return types.MappingProxyType(found)


def values_of(config: Config) -> dict[str, Any]:
    """Dotted key -> value, in the order of the schema."""
    return {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in key_types()}


def nearest_key(unknown: str) -> str | None:
    """The key or section a person most likely meant by `unknown`, or None when nothing is alike.

    Tried in turn: the same name in another section, a name alike in the same section, a name alike anywhere.
    """
    section, _, name = unknown.rpartition(".")
    keys = list(key_types())
    by_name: dict[str, str] = {}
    for key in keys:
        by_name.setdefault(key.partition(".")[2], key)
    if not section and (alike := difflib.get_close_matches(name, list(sections()), n=1, cutoff=0.7)):
        return alike[0]
    if name in by_name:
        return by_name[name]
    own = [key for key in keys if key.startswith(f"{section}.")]
    for candidates, written in ((own, unknown), (keys, unknown), (list(by_name), name)):
        if alike := difflib.get_close_matches(written, candidates, n=1, cutoff=0.75):
            return by_name.get(alike[0], alike[0])
    return None


def did_you_mean(suggestion: str | None, prefix: str = "") -> str:
    """The tail of a message about an unknown name: the nearest one, or where to find the list."""
    if suggestion is None:
        return "; `dreamer train --help` lists every setting"
    return f"; did you mean '{prefix}{suggestion}'?"


def convert(key: str, written: str, quoted: bool = False) -> Any:
    """The value of `key` from the text a person wrote, in a file or on the command line.

    The schema's type decides how the text is read, so `3e-4` is a number where a number is expected and `on` is
    text where text is expected.

    Args:
        key: dotted key of the schema.
        written: the text, without quotes.
        quoted: whether it stood in quotes in a file; then it can't be a number.
    Raises:
        ConfigError: the text isn't a value of that type.
    """
    return convert_to(key_types()[key], key, written, quoted)


def convert_to(expected: Any, key: str, written: str, quoted: bool = False) -> Any:
    """As `convert`, for a key of any other schema.

    `expected` is a Literal of strings, str, bool, int, float, or tuple[int, ...], which is written `2`, `4,4` or
    `[4, 4]`.
    """
    problem = f"{key}: expected {{}}, got {written!r}"
    if get_origin(expected) is Literal:
        choices = [str(choice) for choice in get_args(expected)]
        if written in choices:
            return get_args(expected)[choices.index(written)]
        alike = difflib.get_close_matches(written, choices, n=1)
        raise ConfigError(
            problem.format("one of " + ", ".join(choices)) + (did_you_mean(alike[0]) if alike else ""), key
        )
    if expected is str:
        return written
    if quoted:
        problem += " in quotes; leave the quotes out"
    if expected is bool:
        if written in ("true", "false") and not quoted:
            return written == "true"
        raise ConfigError(problem.format("true or false"), key)
    if expected is int:
        if _INTEGER.fullmatch(written) and not quoted:
            return int(written)
        raise ConfigError(problem.format("an integer"), key)
    if expected == INTEGERS:
        inner = written[1:-1] if written.startswith("[") and written.endswith("]") else written
        parts = [part.strip() for part in inner.split(",")]
        if all(_INTEGER.fullmatch(part) for part in parts) and not quoted:
            return tuple(int(part) for part in parts)
        raise ConfigError(problem.format("integers such as 2 or [4, 4]"), key)
    if expected is float:
        return _to_float(key, written, quoted, problem)
    raise TypeError(f"the schema's {key} has a type that can't be written in a file: {expected}")


def _to_float(key: str, written: str, quoted: bool, problem: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if quoted or not math.isfinite(value):
        raise ConfigError(problem.format("a number"), key)
    return value
