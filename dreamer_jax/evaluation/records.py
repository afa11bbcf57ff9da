"""Records of an evaluation in a JSONL file: what is there need not be computed again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError


@contextlib.contextmanager
def alone(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """While this process is the only one at a file or folder, of those that ask so. A disk without locks has none.

    By `flock`: a lock of `lockf`, as `RunFolder.alone` has it, ends when its process closes the file anywhere, and the
    records are read and written meanwhile.

    Args:
        path: of a folder, or of a file, which is made.
        waiting: gets a line where another process has to be waited for; without it, that is refused.

    Raises:
        UserError: another process is at it.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # what can't be written is said by whoever writes it
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
            held.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise UserError(
                        f"{path}: another process is at this evaluation; wait for it, or choose a folder with --out"
                    ) from None
                waiting(f"{path}: another process is at this evaluation; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Records:
    """The records of one task, by index. The file's first line says what they are answers to.

    Args:
        path: the file; an existing one is read, and a last line cut short by a kill is dropped.
        identity: what must be equal for records to be used again.
        fresh: discard an existing file.
        renew: discard one with records of another evaluation, instead of refusing it.
        meant: names in the identity -> how a message says that their value is another.

    Raises:
        UserError: the file holds records of another evaluation, or can't be read or written.
    """

    def __init__(
        self,
        path: Path,
        identity: dict[str, Any],
        fresh: bool = False,
        renew: bool = False,
        meant: Mapping[str, str] | None = None,
    ):
        self._path, self._meant = path, meant or {}
        self.done: dict[int, dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = b"" if fresh or not path.exists() else path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole and not self._read(whole, identity, renew):
                whole = b""
            if whole != content or not whole:
                path.write_bytes(whole or (json.dumps(identity) + "\n").encode())
        except OSError as error:
            raise UserError(f"can't keep records in {path}: {error.strerror}; choose a folder with --out") from error

    def _read(self, content: bytes, identity: dict[str, Any], renew: bool) -> bool:
        """Whether the records can be used; they are in `done` then."""
        lines = content.splitlines()
        try:
            header, *records = (json.loads(line) for line in lines)
            done = {record["index"]: record for record in records}
            if not isinstance(header, dict):
                raise TypeError("the header isn't an object")
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self._path} is not a file of records; move it away or start anew with --fresh") from None
        if header != identity and done and not renew:  # of a file without records nothing is lost
            names = sorted(name for name in {*header, *identity} if header.get(name) != identity.get(name))
            changed = ", ".join(self._meant.get(name, f"another {name}") for name in names)
            raise UserError(
                f"{self._path} holds {len(done)} records of another evaluation ({changed}); "
                "keep both with --out DIR, or start anew with --fresh"
            )
        self.done = done if header == identity else {}
        return header == identity

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Append records; they are on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=True) + "\n" for record in records)
        self.done |= {record["index"]: record for record in records}
