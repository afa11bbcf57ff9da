"""How long a collective takes on the wires of a slice, at best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.parallel.mesh import SLICE, axis_names
from dreamer_jax.planning.topology import Topology


class Wires:
    """The links under each axis of a mesh, whose devices are ordered by their coordinates in the torus."""

    def __init__(self, mesh: MeshConfig, topology: Topology):
        self.topology = topology
        self.sizes = dict(zip(axis_names(len(mesh.data)), (mesh.slices, *mesh.data, mesh.expert), strict=True))

    def seconds(self, kind: str, size: float, axes: Sequence[str]) -> float:
        """Time of one collective.

        Args:
            kind: as HLO calls it.
            size: bytes: of the whole array on one chip, as `Collective.bytes` has it.
            axes: mesh axes it goes over.
        """
        active = [axis for axis in axes if self.sizes.get(axis, 1) > 1]
        if not active:
            return 0.0
        if SLICE in active:
            return self._between_slices(kind, size, [axis for axis in active if axis != SLICE])
        members = math.prod(self.sizes[axis] for axis in active)
        share = (members - 1) / members
        bandwidth = self._bandwidth(active)
        if kind == "collective-permute":
            return size / self._torus.link_bandwidth
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Half of what every chip holds crosses the middle of the group, over all chips' links there.
            longest = max(length for length, _ in self._extents(active))
            return size * longest / (4 * bandwidth)
        return size * share / bandwidth * (2 if kind == "all-reduce" else 1)

    @property
    def _torus(self):
        assert self.topology.chip.torus is not None
        return self.topology.chip.torus

    def _between_slices(self, kind: str, size: float, inner: list[str]) -> float:
        slices = self.sizes[SLICE]
        share = (slices - 1) / slices * (2 if kind == "all-reduce" else 1)
        within = self.seconds(kind, size, inner) if inner else 0.0
        return within + size * share / self._torus.network_bandwidth

    def _bandwidth(self, axes: Sequence[str]) -> float:
        """Bytes/s into a chip over the links of a group: two a ring, one a line, of every torus axis it extends on."""
        links = sum(2 if ring else 1 for _, ring in self._extents(axes))
        return links * self._torus.link_bandwidth

    def _extents(self, axes: Sequence[str]) -> list[tuple[int, bool]]:
        """(length, whether it closes to a ring) of each torus axis along which a group's chips differ."""
        inner = [axis for axis in self.sizes if axis != SLICE]
        shape = tuple(self.sizes[axis] for axis in inner)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        group = numbers[tuple(slice(None) if axis in axes else 0 for axis in inner)].ravel()
        coordinates = np.array(np.unravel_index(group, self.topology.shape))
        found = []
        for places, side in zip(coordinates, self.topology.shape, strict=True):
            length = len(set(places.tolist()))
            if length > 1:
                found.append((length, length == side and side % self._torus.ring_multiple == 0))
        return found
