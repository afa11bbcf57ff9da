"""Programs without the lines of code that their operations come from, where those make a compiler hang.

libtpu 0.0.42, which jax 0.10 asks for, never ends compiling some programs with loops in loops, among them the tokens of
a Huginn: copying an operation out of a function makes a stack frame its own caller, and what looks for the outermost
caller goes round for ever. Without frames there is nothing to walk. What an operation is called stays.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os

VARIABLE = "JAX_TRACEBACK_IN_LOCATIONS_LIMIT"
MENDED = (0, 0, 50)
"""The oldest libtpu with which that program has been seen to compile."""


def settings() -> dict[str, str]:
    """What to put into the environment before jax is imported: nothing where no such libtpu is installed, or where the
    user has said something else."""
    return {VARIABLE: "0"} if _hangs() and VARIABLE not in os.environ else {}


def leave_out() -> None:
    """The same for a process that has imported jax."""
    if settings():
        import jax

        jax.config.update(VARIABLE.lower(), 0)


@functools.cache
def _hangs() -> bool:
    """Whether the libtpu that is installed is one of those."""
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = [int(part) for part in version.split(".")[:3] if part.isdigit()]
    return tuple(numbers) < MENDED
