"""Values of a config.json that others wrote: what is read, and what is said of mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.export.form import LARGEST_SIZE, MOST_LAYERS

LARGEST = 1e30


def whole(path: Path, content: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number; `path` is that of config.json, for messages.

    Raises:
        UserError: it is something else, or missing and has no default.
    """
    value = _value(path, content, key, default)
    limit = MOST_LAYERS if "layers" in key else LARGEST_SIZE
    if type(value) is not int or abs(value) >= limit:
        raise UserError(f"{path}: {key} can't be {value!r}; it is a whole number")
    return value


def number(path: Path, content: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number; see `whole`."""
    value = _value(path, content, key, default)
    if type(value) not in (int, float) or not abs(value) < LARGEST:
        raise UserError(f"{path}: {key} can't be {value!r}; it is a number")
    return float(value)


def flag(path: Path, content: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false; see `whole`."""
    value = _value(path, content, key, default)
    if type(value) is not bool:
        raise UserError(f"{path}: {key} can't be {value!r}; it is true or false")
    return value


def rope_base(path: Path, content: Mapping[str, Any]) -> float:
    """The base of unscaled rotations, as earlier and later versions of transformers write it.

    Raises:
        UserError: it is missing, or the rotations are scaled.
    """
    # As transformers reads them: rope_scaling counts in place of rope_parameters, and what either says before the rest.
    rope: Any = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        raise UserError(f"{path}: rope_scaling is of type {kind!r}; only unscaled rotations can be computed")
    base = rope.get("rope_theta", content.get("rope_theta"))
    return number(path, {"rope_theta": base}, "rope_theta")


def _value(path: Path, content: Mapping[str, Any], key: str, default: Any) -> Any:
    value = default if content.get(key) is None else content[key]
    if value is None:
        raise UserError(f"{path}: {key} is missing")
    return value


def refuse_other_layers(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse a config.json with layers of another type than full attention.

    Raises:
        UserError: there are some.
    """
    types = content.get("layer_types") or []
    others = [its for its in types if its != "full_attention"] if isinstance(types, list) else [types]
    if others:
        raise UserError(f"{path}: layer_types has {others[0]!r}; only full_attention can be computed")
