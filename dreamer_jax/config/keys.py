"""The dotted keys of a configuration: their types, the conversion of a written value, and the nearest name.

The sections of sections.py are the same for every model; the keys of the section `model` are those of its family.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dreamer_jax.config.models import at_hand, key_of
from dreamer_jax.config.sections import Config
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.errors import ConfigError

_INTEGER = re.compile(r"[-+]?[0-9](_?[0-9]){0,17}")  # 18 digits fit in 64 bits
INTEGERS = tuple[int, ...]
"""The type of a key that holds one integer or several."""


SECTIONS = tuple(section.name for section in dataclasses.fields(Config))
"""The names of the sections, in the order of a file."""
SECTIONS_WITHIN = tuple(
    f"{section}.{f.name}"
    for section, section_type in get_type_hints(Config).items()
    if dataclasses.is_dataclass(section_type)
    for f in dataclasses.fields(section_type)
    if dataclasses.is_dataclass(get_type_hints(section_type)[f.name])
)
"""The names of the sections within sections."""
FAMILY = "model.family"
"""The key that decides which keys the section `model` has."""


@functools.cache
def sections(model: type[ModelConfig]) -> Mapping[str, type]:
    """Section name -> its dataclass, in the order of a file.

    Args:
        model: the dataclass of a family: `find(key).config`, or the type of a configuration's `model`.
    """
    return types.MappingProxyType(get_type_hints(Config) | {"model": model})


@functools.cache
def key_types(model: type[ModelConfig]) -> Mapping[str, Any]:
    """Dotted key -> its annotation, in the order of a file, which starts with `model.family`.

    Args:
        model: as for `sections`.
    Raises:
        ConfigError: a key has a type that `convert` doesn't know: its value could be written, but never read again.
    """
    found = {FAMILY: str}
    for section, section_type in sections(model).items():
        found.update(_keys_in(section, section_type))
    for key, annotation in found.items():
        if annotation not in (str, bool, int, float, INTEGERS) and get_origin(annotation) is not Literal:
            raise ConfigError(
                f"{key}: family {key_of(model)} gives it the type {annotation}, which a file can't hold; take str, "
                "bool, int, float, Literal, tuple[int, ...], or a dataclass of such",
                key,
            )
    return types.MappingProxyType(found)


def _keys_in(section: str, section_type: type) -> dict[str, Any]:
    """The dotted keys of a section, and of the sections in it."""
    hints, found = get_type_hints(section_type), {}
    for f in dataclasses.fields(section_type):
        key, annotation = f"{section}.{f.name}", hints[f.name]
        within = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
        found |= _keys_in(key, annotation) if within else {key: annotation}
    return found


@functools.cache
def sections_within(model: type[ModelConfig]) -> frozenset[str]:
    """The names of the sections within the section `model` of a family.

    Args:
        model: as for `sections`.
    """
    keys = (key.split(".") for key in key_types(model) if key.startswith("model."))
    return frozenset(".".join(parts[:end]) for parts in keys for end in range(2, len(parts)))


def values_of(config: Config) -> dict[str, Any]:
    """Dotted key -> value, in the order of a file."""
    return {key: operator.attrgetter(key)(config) for key in key_types(type(config.model))}


def unknown_key(key: str, model: type[ModelConfig], prefix: str = "") -> str | None:
    """What is wrong with a key that a family hasn't; None for one that it has.

    Args:
        key: dotted key, or what a person wrote for one.
        model: the dataclass of the family.
        prefix: what stands before a key where it was written.
    """
    if key in key_types(model):
        return None
    others = [each for each in at_hand() if key in key_types(each.config)]
    if others:
        owners = f"famil{'y' if len(others) == 1 else 'ies'} {', '.join(each.key for each in others)}"
        fix = f"remove it, or change {FAMILY}"
        return f"'{prefix}{key}' is a setting of {owners}, and {FAMILY} is {key_of(model)}; {fix}"
    kind = "option" if prefix else "key"
    return f"unknown {kind} '{prefix}{key}'{did_you_mean(nearest_key(key, model), prefix)}"


def nearest_key(unknown: str, model: type[ModelConfig]) -> str | None:
    """The key or section a person most likely meant by `unknown`, or None when nothing is alike.

    Tried in turn: the same name in another section, in the same one a name with these initials (`lr`) or a name alike,
    a name alike anywhere.
    """
    section, _, name = unknown.rpartition(".")
    keys = list(key_types(model))
    by_name: dict[str, str] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], key)
    if not section and (alike := difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.7)):
        return alike[0]
    if name in by_name:
        return by_name[name]
    # Without their section, with which all names would be alike.
    own = {key.rpartition(".")[2]: key for key in keys if key.startswith(f"{section}.")}
    short = [each for each in own if "".join(word[0] for word in each.split("_")) == name and "_" in each]
    if alike := short or difflib.get_close_matches(name, own, n=1):
        return own[alike[0]]
    if section not in SECTIONS and (alike := difflib.get_close_matches(unknown, keys, n=1, cutoff=0.75)):
        return alike[0]
    if alike := difflib.get_close_matches(name, by_name, n=1, cutoff=0.75):
        return by_name[alike[0]]
    return None


def did_you_mean(suggestion: str | None, prefix: str = "") -> str:
    """The tail of a message about an unknown name: the nearest one, or where to find the list."""
    if suggestion is None:
        return "; `dreamer train --help` lists every setting"
    return f"; did you mean '{prefix}{suggestion}'?"


def convert(expected: Any, key: str, written: str, quoted: bool = False) -> Any:
    """The value of a key from the text a person wrote, in a file or on the command line.

    The type decides how the text is read, so `3e-4` is a number where a number is expected and `on` is text where text
    is expected.

    Args:
        expected: a Literal of strings, str, bool, int, float, or tuple[int, ...], which is written `2`, `4,4` or
            `[4, 4]`.
        key: dotted key, for messages.
        written: the text, without quotes.
        quoted: whether it stood in quotes in a file; then it can't be a number.
    Raises:
        ConfigError: the text isn't a value of that type.
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
    raise TypeError(f"the setting {key} has a type that can't be written in a file: {expected}")


def _to_float(key: str, written: str, quoted: bool, problem: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if quoted or not math.isfinite(value):
        raise ConfigError(problem.format("a number"), key)
    return value
