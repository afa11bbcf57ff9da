"""What compiling for a topology told, kept between processes: the program itself can't be read back without a TPU.

A report is found by all that decides it: configuration, topology, the versions of jax and libtpu, the flags in the
environment, and the source of this package. It is JSON, a few kilobytes. Kept unless compiled programs are not to be,
or a family of the user's own is at hand, whose source may change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pallas_kernels
from dreamer_jax import program_cache
from dreamer_jax.config import Config, to_yaml
from dreamer_jax.config.models import VARIABLE
from dreamer_jax.config.sections import RunConfig
from dreamer_jax.planning.topology import Topology
from dreamer_jax.runs.folders import write_atomically

MOST = 200
"""Reports that are kept; what was asked for longest ago goes first."""


class KeptReport:
    """The place of one report.

    Args:
        config, topology: of the step; where its run lies plays no part, and its seed none.
    """

    def __init__(self, config: Config, topology: Topology):
        versions = [_version(name) for name in ("jax", "jaxlib", "libtpu", "libtpu-nightly")]
        flags = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "LIBTPU_"))}
        step = to_yaml(dataclasses.replace(config, run=RunConfig()))
        decides = [step, topology.name, topology.slices, versions, flags, _source()]
        key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        self._wanted = program_cache.wanted() and not os.environ.get(VARIABLE)
        self._path = program_cache.caches() / "plans" / f"{key[:32]}.json"

    def read(self) -> dict[str, Any] | None:
        """What was told; None if nothing is kept, or if it can't be read."""
        if not self._wanted:
            return None
        try:
            told = json.loads(self._path.read_text(encoding="utf-8"))
            self._path.touch()
        except (OSError, ValueError):
            return None
        return told

    def write(self, told: dict[str, Any]) -> None:
        """Keep it, and no more than `MOST` of all; that it can't be is no reason to stop."""
        if not self._wanted:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(told))
            others = sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in others[:-MOST]:
                path.unlink()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _source() -> str:
    """A hash of every file of the packages that a step is made of."""
    digest = hashlib.sha256()
    for path in _files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _files() -> Iterator[Path]:
    for package in (Path(__file__).parents[1], Path(pallas_kernels.__path__[0])):
        yield from sorted(package.rglob("*.py"))
