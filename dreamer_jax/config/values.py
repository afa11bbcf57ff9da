"""Types of values that several sections share, and the checks that a section makes of its values."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dreamer_jax.errors import ConfigError

Implementation = Literal["auto", "xla", "pallas"]
Remat = Literal["full", "attention", "none"]


def require(condition: bool, key: str, problem: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {problem}", key=key)


def require_positive(section: object, prefix: str, allow_zero: tuple[str, ...] = ()) -> None:
    """Every number of a section is positive, but for the named ones, which may be zero."""
    for f in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        smallest_ok = value >= 0 if f.name in allow_zero else value > 0
        require(
            smallest_ok,
            f"{prefix}.{f.name}",
            f"{value} is too small; it must be " + ("zero or more" if f.name in allow_zero else "more than zero"),
        )
