"""A configuration as text: YAML that loads back to an equal one, and the difference of two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from dreamer_jax.config.keys import SECTIONS, values_of
from dreamer_jax.config.loading import LoadedConfig
from dreamer_jax.config.sections import Config

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.+/-]*")


def to_yaml(config: LoadedConfig | Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value as YAML, with where it came from as a trailing comment.

    Args:
        config: the configuration; a `LoadedConfig` brings its own origins.
        origins: dotted key -> origin; keys it lacks get no comment.
    Returns:
        Text that `load_config` reads back to an equal `Config`.
    """
    if isinstance(config, LoadedConfig):
        origins = config.origins if origins is None else origins
        config = config.config
    lines: list[str] = []
    before: list[str] = []
    for key, value in values_of(config).items():
        *within, name = key.split(".")
        for depth, section in enumerate(within):
            if within[: depth + 1] != before[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        before = within
        comment = " ".join((origins or {}).get(key, "").split())  # a line break would end the comment
        line = f"{'  ' * len(within)}{name}: {_scalar(value)}"
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def difference(a: Config, b: Config) -> list[str]:
    """One line for each key whose values differ, such as "model.depth: 8 -> 16"; empty when a equals b.

    A key that one of them lacks is "(not in dreamer)" there, when that is its family.
    """
    before, after = values_of(a), values_of(b)
    keys = sorted({**before, **after}, key=lambda key: SECTIONS.index(key.partition(".")[0]))
    lines = []
    for key in keys:
        old, new = (
            _scalar(values[key]) if key in values else f"(not in {config.model.family})"
            for values, config in ((before, a), (after, b))
        )
        if old != new:
            lines.append(f"{key}: {old} -> {new}")
    return lines


def _scalar(value: Any) -> str:
    """A value as one line of YAML that any YAML reader takes for the same value."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
            return value
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).rstrip("\n")
    return yaml.safe_dump(value, allow_unicode=True).removesuffix("...\n").rstrip("\n")
