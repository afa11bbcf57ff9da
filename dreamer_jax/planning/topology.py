"""TPU slices by name, and their devices on a machine that has none: libtpu compiles for them all the same."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from dreamer_jax import stack_frames
from dreamer_jax.chips import CHIPS, Chip, chip_named
from dreamer_jax.errors import UserError, how_to_install

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""What a process has to be started with to compile for a topology without its chips."""


@dataclass(frozen=True)
class Topology:
    """Slices of TPU chips.

    Attributes:
        chip: of all of them.
        shape: chips along each axis of a slice's torus.
        slices: how many such slices, connected by the data-centre network.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As people write it, of one slice: v5p:4x4x4."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return self.slices * math.prod(self.shape)


def parse_topology(text: str, slices: int = 1) -> Topology:
    """The slices that `text` names, such as "v5p:4x4x4".

    Raises:
        UserError: for an unknown chip or a slice that isn't offered.
    """
    family, _, written = text.partition(":")
    chip = chip_named(family)
    if chip is None or chip.torus is None:
        known = ", ".join(chip.name for chip in CHIPS.values() if chip.torus)
        raise UserError(f"unknown topology '{text}': write CHIP:SHAPE such as v5p:4x4x4, with one of the chips {known}")
    if written not in chip.topologies:
        offered = ", ".join(f"{chip.name}:{shape}" for shape in chip.topologies)
        raise UserError(f"unknown topology '{text}'; offered: {offered}")
    return Topology(chip, tuple(int(side) for side in written.split("x")), slices)


def require_libtpu() -> None:
    """Raises UserError, which says what to install, where libtpu is missing."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for a TPU needs libtpu, which is not installed (no TPU is needed); " + how_to_install("tpu")
        )


def child_environment() -> dict[str, str]:
    """Environment of a child process that compiles for a topology; XLA's flags for CPUs are left out."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | stack_frames.settings() | ENVIRONMENT


def devices_of(topology: Topology) -> Sequence:
    """The devices of a topology, to build a mesh from; the process was started with `ENVIRONMENT`.

    Raises:
        UserError: libtpu is missing or doesn't know the topology.
    """
    require_libtpu()
    from jax.experimental import topologies  # imports jax, which needn't be there to parse a name

    options: dict = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # otherwise each of a chip's two cores is a device
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)  # otherwise a host has four chips, of which one can't be a slice
    try:
        return topologies.get_topology_desc(topology.name, "tpu", **options).devices
    except Exception as error:
        raise UserError(f"libtpu does not know the topology {topology.name}: {error}") from error
