"""Reading the JSON that commands have written, or a person has: what is damaged is said, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError

AGAIN = "remove it, and it is made again"


def read_object(path: Path, fix: str = AGAIN, needs: Iterable[str] = ()) -> dict[str, Any]:
    """The object that a file holds.

    Args:
        path: of the file, which exists.
        fix: what to do about a damaged one, for the message.
        needs: names that it must have.

    Raises:
        UserError: it isn't text in UTF-8, isn't JSON, isn't an object, or lacks a name.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of which UnicodeDecodeError and JSONDecodeError are kinds
        raise UserError(f"{path} is damaged: not valid JSON ({error}); {fix}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: not a JSON object; {fix}")
    missing = [name for name in needs if name not in found]
    if missing:
        raise UserError(f"{path} is damaged: it has no {missing[0]!r}; {fix}")
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines, if there is one; a line that isn't whole, such as a kill leaves, is left out."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found
