"""The device mesh of a configuration.

Axes, in this order and always all present: `slice`, `data0`, `data1`, ... (one for every axis of the torus that
`mesh.data` names) and `expert`. The rows of a batch are divided over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import ConfigError

SLICE = "slice"
EXPERT = "expert"
RING = 4
"""Chips of an axis that is gathered and scattered over together with another like it, in one collective."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that a configuration describes.

    Devices are ordered by slice, then by their coordinates in the torus where they have some, so that the axes of the
    mesh follow those of the torus.

    Args:
        config: the sizes of the axes.
        devices: all devices of the mesh, such as those of a topology. None: those that jax sees; of a single process a
            configuration of one device takes the first of them.

    Raises:
        ConfigError: the product of the axes isn't the number of devices, or the slices aren't as many.
    """
    found = list(jax.devices() if devices is None else devices)
    one_will_do = devices is None and jax.process_count() == 1
    if one_will_do and config.size == 1:
        found = found[:1]
    if config.size != len(found):
        slices = f"{config.slices} slices x " if config.slices > 1 else ""
        experts = f" x expert {config.expert}" if config.expert > 1 else ""
        data = " x ".join(map(str, config.data))
        raise ConfigError(
            f"mesh.data: {config.size} devices asked for ({slices}data {data}{experts}), but there are {len(found)} "
            f"({found[0].platform}); the product must be {len(found)}"
            + (", or 1" if one_will_do and len(found) > 1 else ""),
            key="mesh.data",
        )
    ordered = sorted(found, key=_place)
    slices = {_slice(device) for device in ordered}
    if len(slices) > 1 and len(slices) != config.slices:
        raise ConfigError(f"mesh.slices: {config.slices}, but the devices form {len(slices)} slices", key="mesh.slices")
    shape = (config.slices, *config.data, config.expert)
    return Mesh(np.array(ordered).reshape(shape), axis_names(len(config.data)))


def axis_names(data_axes: int) -> tuple[str, ...]:
    """The names of the mesh's axes, for that many axes of data."""
    return (SLICE, *(f"data{i}" for i in range(data_axes)), EXPERT)


def collective_axes(sizes: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    """The axes that the weights of a slice are gathered over, one collective each: names -> devices.

    Two rings of 4 in a larger torus go together: one collective over both has the wires of both, and takes half the
    time. Other pairs don't because of what libtpu 0.0.42 makes of them: over all chips of a v5e slice it reduces
    gradients in full instead of scattering them, over 2 x 2 chips those of some megabytes, and over 8 x 8 chips it
    moves a sixth of the result a second time.

    Args:
        sizes: of the mesh's axes, by name, in the mesh's order.
    """
    axes: dict[tuple[str, ...], int] = {(name,): size for name, size in sizes.items() if size > 1 and name != SLICE}
    rings = [names for names, size in axes.items() if names != (EXPERT,) and size == RING][:2]
    if len(rings) == 2 and math.prod(axes.values()) > RING**2:
        return {rings[0] + rings[1]: RING**2} | {names: size for names, size in axes.items() if names not in rings}
    return axes


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """How the rows of a batch [B, ...] are divided: over every axis."""
    return PartitionSpec(mesh.axis_names)


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _place(device: Any) -> tuple:
    coordinates = tuple(getattr(device, "coords", None) or ())
    return _slice(device), coordinates, getattr(device, "core_on_chip", None) or 0, device.id
