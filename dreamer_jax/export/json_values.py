"""Values of a config.json that others wrote: what is read, and what is said of mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.export.form import LARGEST_SIZE, MOST_LAYERS

LARGEST = 1e30
LLAMA3 = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_length": "original_max_position_embeddings",
}
"""Our setting -> the key of rope_scaling, of its type llama3."""


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
    """The base of unscaled rotations; see `rotation`.

    Raises:
        UserError: it is missing, or the rotations are scaled.
    """
    base, scaling = rotation(path, content)
    if scaling:
        raise UserError(f"{path}: rope_scaling is of type 'llama3'; only unscaled rotations can be computed here")
    return base


def rotation(path: Path, content: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """The base of rotations and the settings of their scaling, which are empty for none, as earlier and later versions
    of transformers write them.

    Raises:
        UserError: a number is missing, or the rotations are scaled in another way.
    """
    # As transformers reads them: rope_scaling counts in place of rope_parameters, and what either says before the rest.
    rope: Any = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in ("default", "llama3"):
        raise UserError(f"{path}: rope_scaling is of type {kind!r}; only llama3 and unscaled rotations can be computed")
    base = number(path, {"rope_theta": rope.get("rope_theta", content.get("rope_theta"))}, "rope_theta")
    if kind == "default":
        return base, {}
    read = {"rope_length": whole}
    return base, {ours: read.get(ours, number)(path, rope, key) for ours, key in LLAMA3.items()}


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
