"""Accelerator types of Google Cloud: which chip, topology and machines stand behind a name such as v5p-128."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from dreamer_jax.chips import CHIPS, Chip
from dreamer_jax.errors import UserError


@dataclass(frozen=True)
class Slice:
    """Chips that are wired together and rented as one.

    Attributes:
        accelerator_type: Google's name, e.g. v5litepod-16.
        chip: its chips.
        topology: chips along each axis, e.g. 4x4.
    """

    accelerator_type: str
    chip: Chip
    topology: str

    @property
    def chips(self) -> int:
        """Number of chips."""
        return _chips(self.topology)

    @property
    def chips_per_host(self) -> int:
        """Chips of each machine: larger slices are made of machines with four."""
        return self.chips if self.chips <= self.chip.largest_host else 4

    @property
    def hosts(self) -> int:
        """Number of machines, each of which runs one process."""
        return self.chips // self.chips_per_host

    @property
    def runtime_version(self) -> str:
        """Software image of the TPU VM for JAX."""
        return RUNTIMES[self.chip.name]

    @property
    def node_accelerator(self) -> str:
        """Label cloud.google.com/gke-tpu-accelerator of its nodes on GKE."""
        return MACHINES[self.chip.name][0]

    @property
    def machine_type(self) -> str:
        """Machine type of its nodes on GKE."""
        return f"{MACHINES[self.chip.name][1]}-{self.chips_per_host}t"


RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""Chip -> software version of a TPU VM."""
MACHINES = {
    "v4": ("tpu-v4-podslice", "ct4p-hightpu"),
    "v5e": ("tpu-v5-lite-podslice", "ct5lp-hightpu"),
    "v5p": ("tpu-v5p-slice", "ct5p-hightpu"),
    "v6e": ("tpu-v6e-slice", "ct6e-standard"),
}
"""Chip -> node label and family of machine types on GKE."""


def slice_of(name: str) -> Slice:
    """The slice that is called `name`: Google's accelerator type, or the chip's usual name (v5e-16).

    Raises:
        UserError: when nothing of that name is offered; names what is.
    """
    slices = all_slices()
    found = {s.accelerator_type: s for s in slices} | {f"{s.chip.name}-{s.chips * s.chip.cores}": s for s in slices}
    if name in found:
        return found[name]
    family = [s for s in slices if name.startswith((f"{s.chip.name}-", f"{s.chip.accelerator}-"))]
    if family:
        offered = ", ".join(s.accelerator_type for s in family)
        unit = "TensorCores, two a chip" if family[0].chip.cores == 2 else "chips"
        raise UserError(f"there is no TPU type '{name}' (the number counts {unit}); offered: {offered}")
    alike = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean {alike[0]}?" if alike else "e.g. v4-32, v5litepod-16, v5p-128"
    raise UserError(f"there is no TPU type '{name}'; {hint}")


def all_slices() -> list[Slice]:
    """Every slice of the chip table."""
    return [
        Slice(f"{chip.accelerator}-{_chips(topology) * chip.cores}", chip, topology)
        for chip in CHIPS.values()
        for topology in chip.topologies
    ]


def _chips(topology: str) -> int:
    return math.prod(int(side) for side in topology.split("x"))
