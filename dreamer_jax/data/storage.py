"""Files that are either complete or absent, and the records between the stages of a preparation."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dreamer_jax.errors import UserError

TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HEAD = struct.Struct("<III")

RECORD = np.dtype([("offset", "<i8"), ("tokens", "<i4"), ("prompt", "<i4")])
"""Of a kept record: where it begins in its part's file, its tokens with bos and eos, the prompt's tokens."""
EXACT = np.dtype([("key", "<u8"), ("check", "<u8"), ("record", "<u4")])
"""128 bits of a record's text, and the record's number in its part; sorted by key."""
BAND = np.dtype([("key", "<u8"), ("record", "<u4")])
"""A key that near duplicates share; sorted by key."""


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns failed writing into a message."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL or str(error).endswith(" written"):  # NumPy says how much it wrote, and not why no more
            why = error.strerror or error
            raise UserError(f"{path}: no space left to write ({why}); make room and start again") from None
        raise UserError(f"can't write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; the file takes its place at once when the block ends well, and not at all otherwise."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")
    with explained(path):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A directory to fill; it takes its place at once when the block ends well, and not at all otherwise."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")
    with explained(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            try:
                os.rename(temporary, path)
            except OSError:
                if not path.is_dir():  # else a process that outlived its killed parent was first, with the same content
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Delete what a killed run was writing."""
    for path in directory.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON as a whole file; half a surrogate pair, as in the name of a file or a field, becomes an escape."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file as a whole file."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


class Kept(NamedTuple):
    """A record that passed the rules that look at one record at a time."""

    prompt: str
    completion: str
    tokens: np.ndarray
    """int32 [n]: bos, prompt, completion, eos."""
    prompt_tokens: int


class PartWriter:
    """Writes one part of a unit: payloads as they come, the arrays of keys when it is closed.

    Files of part p: p.bin, p.records.npy (RECORD), p.exact.npy (EXACT), p.bands.npy (BAND).
    """

    def __init__(self, directory: Path, number: int):
        self._stem = directory / str(number)
        self._file = self._stem.with_suffix(".bin").open("wb")
        self._records: list[tuple[int, int, int]] = []
        self._exact: list[bytes] = []
        self._bands: list[np.ndarray] = []
        self._offset = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, kept: Kept, exact: bytes) -> None:
        """Append a record and the 16 bytes of its exact key."""
        prompt, completion = kept.prompt.encode("utf-8"), kept.completion.encode("utf-8")
        tokens = kept.tokens.astype("<i4").tobytes()
        self._file.write(_HEAD.pack(len(prompt), len(completion), len(kept.tokens)) + prompt + completion + tokens)
        self._records.append((self._offset, len(kept.tokens), kept.prompt_tokens))
        self._offset += _HEAD.size + len(prompt) + len(completion) + len(tokens)
        self._exact.append(exact)
        self.tokens += len(kept.tokens)

    def add_bands(self, keys: np.ndarray) -> None:
        """Append the band keys uint64 [n, BANDS] of the n records that were added last without any."""
        self._bands.append(keys)

    def close(self) -> None:
        """Write the arrays."""
        self._file.close()
        n = len(self._records)
        np.save(self._stem.with_suffix(".records.npy"), np.array(self._records, RECORD))
        exact = np.empty(n, EXACT)
        words = np.frombuffer(b"".join(self._exact), "<u8").reshape(n, 2) if n else np.zeros((0, 2), "<u8")
        exact["key"], exact["check"], exact["record"] = words[:, 0], words[:, 1], np.arange(n)
        np.save(self._stem.with_suffix(".exact.npy"), exact[np.argsort(exact["key"], kind="stable")])
        keys = np.concatenate(self._bands) if self._bands else np.zeros((0, 1), np.uint64)
        order = np.argsort(keys, axis=None, kind="stable")
        bands = np.empty(keys.size, BAND)
        bands["key"], bands["record"] = keys.reshape(-1)[order], order // keys.shape[1]
        np.save(self._stem.with_suffix(".bands.npy"), bands)


class PartReader:
    """Random access to the records of a part."""

    def __init__(self, directory: Path, number: int):
        self.records = np.load(directory / f"{number}.records.npy")
        self._file = (directory / f"{number}.bin").open("rb")

    def __getitem__(self, record: int) -> Kept:
        offset, tokens, prompt_tokens = self.records[record].item()
        self._file.seek(offset)
        prompt_bytes, completion_bytes, _ = _HEAD.unpack(self._file.read(_HEAD.size))
        prompt, completion = self._file.read(prompt_bytes), self._file.read(completion_bytes)
        array = np.frombuffer(self._file.read(4 * tokens), "<i4")
        return Kept(prompt.decode("utf-8"), completion.decode("utf-8"), array, prompt_tokens)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
