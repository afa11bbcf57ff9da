"""Writing model.safetensors piece by piece, and strict reading: nothing is trusted, nothing is executed.

The format: eight bytes n, little-endian; n bytes of JSON, tensor name -> dtype, shape, [begin, end) in the rest of
the file; the values, contiguous. The header is padded so that the values start at a multiple of 64 bytes: then
arrays can be used where they lie in the mapped file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.json_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 1 << 25
ALIGNMENT = 64
LARGEST_HEADER = 100_000_000
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write.

    Attributes:
        name: its name in the file.
        dtype: "F32", "BF16" or "F16".
        shape: its shape.
        read: (start, stop) -> rows start..stop-1 of the leading axis, in any float dtype.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) in order, in the written dtype."""
        rows = self.shape[0]
        step = max(1, PIECE_BYTES * rows // max(1, self.size))
        for start in range(0, rows, step):
            yield start, np.ascontiguousarray(self.read(start, min(start + step, rows)), DTYPES[self.dtype])


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where its values are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def array(self) -> np.ndarray:
        """The values, mapped read-only from the file."""
        flat = np.memmap(self.path, np.uint8, "r", offset=self.begin, shape=(self.end - self.begin,))
        return flat.view(DTYPES[self.dtype]).reshape(self.shape)


def write(folder: Path, tensors: Sequence[Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors into one file, or into several and an index when they exceed `shard_bytes`.

    At most a few pieces of PIECE_BYTES are in memory at once. A tensor is never split between files.
    """
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.size for t in shards[-1]) + tensor.size > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(t.size for t in tensors)}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write tensors into one file."""
    # What fills whole 64-byte lines comes first, so that one odd size doesn't shift everything after it.
    ordered = sorted(tensors, key=lambda tensor: (tensor.size % ALIGNMENT != 0, -DTYPES[tensor.dtype].itemsize))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            for _, piece in tensor.pieces():
                file.write(piece.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def open_tensors(folder: Path) -> dict[str, Stored]:
    """Name -> tensor, of a folder's one file or of all that its index names.

    Raises:
        UserError: a file is missing, truncated, has bytes too many, or a header that contradicts itself.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).is_file():
            raise UserError(f"{folder} has no {SINGLE}; it isn't an exported model, or the copy is incomplete")
        return open_file(folder / SINGLE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}: weight_map must map tensors to files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name or Path(name).name != name or not name.isprintable():
            raise UserError(f"{index}: {name!r} is not the name of a file in this folder")
    # transformers, saving one file over several, removes these and leaves their index.
    if (folder / SINGLE).is_file() and not any((folder / name).exists() for name in names):
        return open_file(folder / SINGLE)
    found: dict[str, Stored] = {}
    for name in names:
        its = open_file(folder / name)
        expected = {tensor for tensor, file in weight_map.items() if file == name}
        if set(its) != expected:
            raise UserError(f"{index}: {name} has other tensors than the index says: {min(set(its) ^ expected)}")
        found |= its
    return found


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        UserError: there is none, or it isn't one.
    """
    try:
        return read_object(path, "take a whole copy of the folder")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; is this a folder written by `dreamer export`?") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


def open_file(path: Path) -> dict[str, Stored]:
    """Name -> tensor, of one file; raises as `open_tensors` does."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise UserError(f"{path} is not a safetensors file, or it is truncated")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; the copy may be incomplete") from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):  # of which UnicodeDecodeError is a kind
        raise UserError(f"{path}: the header is broken; the file was damaged or altered") from None
    return _tensors_of(path, header, 8 + length, size)


def _tensors_of(path: Path, header: Any, start: int, size: int) -> dict[str, Stored]:
    broken = UserError(f"{path}: the header contradicts itself or the file; it was damaged, altered or truncated")
    if not isinstance(header, dict):
        raise broken
    header.pop("__metadata__", None)
    found, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            raise broken from None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UserError(f"{path}: {name} has dtype {dtype}; only F32, BF16 and F16 can be read")
        if not whole or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise broken
        found[name] = Stored(path, dtype, tuple(shape), start + begin, start + end)
        spans.append((start + begin, start + end))
    spans.sort()
    ends = [start, *(end for _, end in spans)]
    if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != size:
        raise UserError(f"{path} has {size} bytes where its header describes {ends[-1]}; it is truncated or altered")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is doubled")
    return dict(pairs)
