"""`dreamer info`: versions, devices, families of models, and which extras are installed."""

from __future__ import annotations

import inspect
import os
import platform
import sys

from dreamer_jax import __version__, program_cache
from dreamer_jax.cli.extras import requirements, version_of
from dreamer_jax.config.models import find, known
from dreamer_jax.errors import ConfigError, UserError, how_to_install

USAGE = """\
usage: dreamer info

Prints versions, devices, the families of models, and which extras are installed and how to install the others."""


def run(arguments: list[str]) -> int:
    """Print what is installed and which devices jax sees; returns the exit code."""
    if arguments and arguments[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    if arguments:
        raise UserError(f"info: unexpected '{arguments[0]}'; it takes no arguments")
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"dreamer-jax {__version__}, Python {platform.python_version()} ({sys.executable})")
    console.print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores")
    console.print(_devices(), markup=False)
    console.print(f"compiled programs: {program_cache.described()}", markup=False, soft_wrap=True)
    families = Table("family", "models", "from", box=None, header_style="bold", pad_edge=False)
    for row in _families():
        families.add_row(*map(escape, row))
    console.print(families)
    needs = requirements()
    if not needs:
        console.print("used from its folder without being installed; `pip install -e .` there brings the dependencies")
        return 0
    console.print("base: " + ", ".join(f"{name} {version_of(name) or 'missing'}" for name in needs.pop("", [])))
    table = Table("extra", "missing", "how to install", box=None, header_style="bold", pad_edge=False)
    for extra, names in needs.items():
        missing = [name for name in names if version_of(name) is None]
        how = escape(how_to_install(extra)) if missing else "installed"
        table.add_row(extra, escape(", ".join(missing)) or "-", how)
    console.print(table)
    return 0


def _families() -> list[tuple[str, str, str]]:
    """(key, what its models are or why it can't be used, where it is from) of each family."""
    rows = []
    for key in known():
        try:
            family = find(key)
        except ConfigError as error:
            rows.append((key, str(error), "-"))
        else:
            rows.append((key, (inspect.getdoc(family.config) or "-").partition("\n")[0], family.origin))
    return rows


def _devices() -> str:
    """One line on the devices of jax, or on why there are none."""
    try:
        import jax
    except ImportError as error:
        return f"devices: none, jax can't be imported ({error})"
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"devices: none, jax found no usable platform ({error})"
    kinds = sorted({device.device_kind for device in devices})
    return f"devices: {len(devices)} on platform {devices[0].platform} ({', '.join(kinds)})"
