"""What the installed metadata says about dependencies and extras: the single list of them is in setup.cfg."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTION = "dreamer-jax"
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(?:\[(?P<extras>[^]]*)\])?")
_EXTRA_MARKER = re.compile(r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, list[str]]:
    """Extra -> the distributions it needs; "" is the base install. Empty when the package isn't installed itself.

    An extra of a dependency brings what it adds: `jax[tpu]` needs jax and libtpu.
    """
    found: dict[str, list[str]] = {}
    for extra, name, its_extras in _requires(DISTRIBUTION):
        needed = [inner for inner_extra, inner, _ in _requires(name) if inner_extra in its_extras]
        found.setdefault(extra, []).extend([name, *needed])
    return {extra: list(dict.fromkeys(names)) for extra, names in found.items()}


def extra_of(module: str) -> str | None:
    """The first extra ("": base install) that brings a distribution named like `module`, or None."""
    wanted = _normal(module)
    for extra, names in requirements().items():
        if wanted in map(_normal, names):
            return extra
    return None


def _requires(distribution: str) -> list[tuple[str, str, list[str]]]:
    """(extra it belongs to, name, extras asked of it) of each requirement of an installed distribution."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    parsed = []
    for line in lines:
        match, marker = _REQUIREMENT.match(line), _EXTRA_MARKER.search(line)
        if match:
            extras = [part.strip() for part in (match["extras"] or "").split(",") if part.strip()]
            parsed.append((marker["extra"] if marker else "", match["name"], extras))
    return parsed


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
