"""Reading the arrays of a checkpoint piece by piece, straight onto the devices that shall hold them.

This goes around Orbax to the store below it: Orbax reads and decodes whole arrays, all of them at once, which takes
nearly twice the state's memory on a host that holds it. Here a few pieces are on their way at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from dreamer_jax.errors import UserError

PIECE_BYTES = 1 << 23
"""Most bytes of an array that are read in one go."""
IN_FLIGHT_SHARE = 40
"""One in this many bytes of what is read may be on its way, and at least two pieces."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>

Index = tuple[tuple[int, int], ...]
"""Start and stop along every axis."""


def open_array(item: epath.Path, name: str) -> Any:
    """An array of an item (`params`, `optimizer`, ...) as a TensorStore; indexing reads what is asked for.

    Args:
        item: folder of the item in a step.
        name: keys joined by dots, such as "layer.expert_attention.gate_up".
    Raises:
        UserError: it can't be read.
    """
    try:
        zarr3 = json.loads((item / "_METADATA").read_text())["use_zarr3"]
        place = os.fspath(item)
        base = place if "://" in place else Path(place).absolute().as_uri()
        kvstore = {"driver": "ocdbt", "base": f"{base}/", "path": f"{name}/"}
        return ts.open({"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}, open=True, read=True).result()
    except (OSError, ValueError) as error:
        raise UserError(f"{item}: {name} can't be read; the checkpoint is damaged: {error}") from None


def read_tree(item: epath.Path, like: Any) -> Any:
    """The arrays of an item.

    Args:
        item: folder of the item in a step.
        like: tree of shapes, dtypes and shardings; leaves may be arrays or `jax.ShapeDtypeStruct`s.
    Raises:
        UserError: an array is missing or has another shape.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    targets = [_Target(item, ".".join(map(_key, path)), leaf) for path, leaf in leaves]
    budget = max(2 * PIECE_BYTES, sum(target.bytes for target in targets) // IN_FLIGHT_SHARE)
    reading: deque[tuple[_Piece, Any]] = deque()
    in_flight = 0
    with _buffers_given_back():
        for piece in (piece for target in targets for piece in target.pieces()):
            while reading and in_flight + piece.bytes > budget:
                in_flight -= _arrive(*reading.popleft())
            reading.append((piece, piece.target.store[tuple(slice(*bounds) for bounds in piece.index)].read()))
            in_flight += piece.bytes
        while reading:
            _arrive(*reading.popleft())
    return structure.unflatten([target.array() for target in targets])


@contextlib.contextmanager
def _buffers_given_back() -> Iterator[None]:
    """Have glibc return freed buffers to the system at once; it would keep up to half of what is read.

    Afterwards it keeps them again, as it does once it has seen large ones come and go: training wants them back.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 26)


class _Target:
    """An array that is being read.

    Attributes:
        bytes: that this process reads for it.
    """

    def __init__(self, item: epath.Path, name: str, like: Any):
        self.store = open_array(item, name)
        self._shape, self._dtype, self._sharding = tuple(like.shape), like.dtype, like.sharding
        if tuple(self.store.shape) != self._shape:
            raise UserError(f"{item}: {name} has the shape {tuple(self.store.shape)} instead of {self._shape}")
        self._devices: dict[Index, list[Any]] = {}  # copies of a part are read once
        for device, index in self._sharding.addressable_devices_indices_map(self._shape).items():
            self._devices.setdefault(_bounds(index, self._shape), []).append(device)
        self._parts: dict[Index, list[jax.Array]] = {}
        self.bytes = sum(math.prod(_lengths(part)) for part in self._devices) * self._dtype.itemsize

    def pieces(self) -> Iterator[_Piece]:
        """What has to be read, in order."""
        for part in self._devices:
            row = math.prod(_lengths(part)[1:]) * self._dtype.itemsize
            first, last = part[0] if part else (0, 1)
            if (last - first) * row <= PIECE_BYTES:
                yield _Piece(self, part, part, (last - first) * row)
                continue
            stored = self.store.chunk_layout.read_chunk.shape[0]
            rows = max(stored, PIECE_BYTES // row // stored * stored)  # no chunk is decoded twice
            for start in range(first, last, rows):
                stop = min(start + rows, last)
                yield _Piece(self, part, ((start, stop), *part[1:]), (stop - start) * row)

    def put(self, part: Index, index: Index, values: np.ndarray) -> None:
        """A piece has come: onto the devices with it."""
        devices = self._devices[part]
        if index == part:
            self._parts[part] = [jax.device_put(values, device) for device in devices]
            return
        if part not in self._parts:
            self._parts[part] = [jnp.zeros(_lengths(part), self._dtype, device=device) for device in devices]
        start = index[0][0] - part[0][0]
        self._parts[part] = [_insert(whole, values, start) for whole in self._parts[part]]

    def array(self) -> jax.Array:
        """The whole, once every piece has come."""
        placed: dict[Any, jax.Array] = {}
        for part, wholes in self._parts.items():
            placed.update(zip(self._devices[part], wholes, strict=True))
        ordered = [placed[device] for device in self._sharding.addressable_devices_indices_map(self._shape)]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, ordered)


@dataclass(frozen=True)
class _Piece:
    """A few rows of a device's part of an array."""

    target: _Target
    part: Index
    index: Index
    bytes: int


def _arrive(piece: _Piece, future: Any) -> int:
    piece.target.put(piece.part, piece.index, np.asarray(future.result()))
    return piece.bytes


@functools.partial(jax.jit, donate_argnums=0)
def _insert(whole: jax.Array, rows: jax.Array, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, start, 0)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _lengths(index: Index) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in index)


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"unknown kind of key: {entry!r}")
