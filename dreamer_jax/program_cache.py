"""Compiled programs are kept between processes: jax's persistent compilation cache, in the user's cache folder.

A small model computes for a second and compiles for ten. jax keys an entry by the program, the versions of jax and XLA,
flags and devices; what it doesn't know is for which processor and over how many cores a CPU program was compiled, so
each kind of machine has a folder of its own. `JAX_ENABLE_COMPILATION_CACHE=false` switches it off and
`JAX_COMPILATION_CACHE_DIR` puts it elsewhere, as jax documents them; then nothing here interferes. Programs for a TPU
that isn't there can't be read back, so `dreamer plan` keeps its reports instead (planning/kept_reports.py).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

LARGEST = 1 << 30
"""Bytes that a folder may take; what was used longest ago goes first."""
SPARE = 2 << 30
"""Bytes that have to be free on the disk; with less, nothing is kept."""
WORTH_KEEPING = 0.1
"""Seconds of compiling from which on a program is kept."""


def folder(cores: int | None = None) -> Path:
    """Where the programs of this kind of machine lie, whether there are any or not.

    Args:
        cores: that a process may use; by default those of this one.
    """
    return caches() / "programs" / f"{_processor()}-{cores or usable_cores()}"


def caches() -> Path:
    """This library's part of the user's cache folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    usual = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache").expanduser()
    return (Path(given) if os.path.isabs(given) else usual) / "dreamer-jax"


def settings(cores: int | None = None) -> dict[str, str]:
    """What to put into the environment, before jax is imported, to have programs kept; makes the folder.

    Empty if the user has said something else, or if nothing can be kept here, which is no reason to stop.

    Args:
        cores: see `folder`.
    """
    if not wanted() or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    path = folder(cores)
    try:
        _prepare(path)
    except OSError:  # no permission, no space, or another process doesn't give the folder free
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(path),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(LARGEST),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(WORTH_KEEPING),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def wanted() -> bool:
    """Whether jax's own switch hasn't been turned off."""
    return os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "true").lower() not in ("false", "0", "f", "n", "no", "off")


def described() -> str:
    """Where programs are kept, how many bytes they take, or that they aren't kept: for `dreamer info`."""
    if not wanted():
        return "not kept (JAX_ENABLE_COMPILATION_CACHE)"
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    path = folder() if given is None else Path(given)
    held = sum(file.stat().st_size for file in path.glob("*") if file.is_file())
    return f"{path} ({held / 2**20:.0f} MiB" + (f" of at most {LARGEST >> 20})" if given is None else ")")


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare(path: Path) -> None:
    """Make the folder, and remove what a killed process left half written: jax writes an entry, then its time."""
    import filelock

    path.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path).free < SPARE:
        raise OSError(f"less than {SPARE >> 30} GiB are free in {path}")
    with filelock.FileLock(path / ".lockfile", timeout=10):  # jax's own: no other process is writing meanwhile
        for entry in path.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink()


def _processor() -> str:
    """A name of the processor's kind and abilities."""
    described = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described += "".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"
