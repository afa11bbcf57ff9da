"""The error a person causes and can mend: one clear message, exit code 2, never a traceback."""

import operator
from pathlib import Path
from typing import Any

INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as of a process that died of it."""
RESTART_EXIT_CODE = 75
"""Exit code of a run that was asked to stop, has saved its state and wants to be started again (EX_TEMPFAIL)."""
DIVERGED = "training has diverged"
"""What the last line of a run says that found no finite loss any more; a study looks for it."""


def how_to_install(extra: str) -> str:
    """The command that brings an extra ("": the base install), for messages; another one where there is no checkout."""
    what = f"[{extra}]" if extra else ""
    if (Path(__file__).resolve().parents[1] / "setup.cfg").is_file():
        return f"in the checkout: pip install -e '.{what}'"
    return f"pip install 'dreamer-jax{what}'"


class UserError(Exception):
    """Something outside the program is wrong: a file, a setting, a device. The message says what and the fix."""


class ConfigError(UserError):
    """A configuration that can't be used.

    Args:
        message: what is wrong and how to mend it.
        key: the dotted key at fault, so that the loader can add the file and line it was set in.
    """

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


def number(value: Any, name: str) -> float:
    """A number, NumPy's and jax's too, as a float.

    Raises:
        UserError: it isn't one.
    """
    try:
        if not isinstance(value, str):
            return float(value)
    except TypeError:
        pass
    raise UserError(f"{name} {value}: must be a number")


def whole(number: Any, name: str, least: int | None = None) -> int:
    """A whole number, NumPy's and jax's too, as an int: jit's cache knows no difference between them.

    Raises:
        UserError: it isn't one, or it is less than `least`.
    """
    try:
        found = operator.index(number)
    except TypeError:
        raise UserError(f"{name} {number}: must be a whole number") from None
    if least is not None and found < least:
        raise UserError(f"{name} {found}: must be {least} or more")
    return found
