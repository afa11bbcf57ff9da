"""The one table of chips: what each computes, remembers and sends, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Torus:
    """How the TPU chips of a slice are wired. Rates are those of "How to Scale Your Model" (jax-ml.github.io).

    Attributes:
        dimensions: 2 or 3; a chip has two links along each.
        link_bandwidth: bytes/s of one link in one direction.
        ring_multiple: a torus axis closes to a ring when its length is a multiple of this; shorter ones are lines.
        network_bandwidth: bytes/s of a chip's share of the data-centre network, which connects slices.
    """

    dimensions: int
    link_bandwidth: float
    ring_multiple: int
    network_bandwidth: float


@dataclass(frozen=True)
class Chip:
    """One accelerator chip.

    Attributes:
        name: as people write it.
        peak_flops: dense bfloat16 FLOP/s.
        bandwidth: bytes/s of its memory.
        memory: bytes.
        accelerator: TPUs: what Google's accelerator types begin with, e.g. v5litepod in v5litepod-16.
        cores: TPUs: what one chip adds to the number in an accelerator type (TensorCores for v4 and v5p).
        largest_host: TPUs: chips of the largest machine that is a slice by itself; machines of larger slices have 4.
        topologies: TPUs: slices that are offered, chips along each axis, smallest first.
        torus: TPUs: how the chips of a slice are wired.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    accelerator: str = ""
    cores: int = 1
    largest_host: int = 4
    topologies: tuple[str, ...] = ()
    torus: Torus | None = None


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


V4_TORUS = Torus(dimensions=3, link_bandwidth=45e9, ring_multiple=4, network_bandwidth=6.25e9)
V5E_TORUS = Torus(dimensions=2, link_bandwidth=45e9, ring_multiple=16, network_bandwidth=3.125e9)
V5P_TORUS = Torus(dimensions=3, link_bandwidth=90e9, ring_multiple=4, network_bandwidth=6.25e9)
V6E_TORUS = Torus(dimensions=2, link_bandwidth=90e9, ring_multiple=16, network_bandwidth=12.5e9)

CHIPS = {
    "TPU v4": Chip("v4", 275e12, 1228e9, 32e9, "v4", cores=2, topologies=CUBES, torus=V4_TORUS),
    "TPU v5 lite": Chip("v5e", 197e12, 819e9, 16e9, "v5litepod", largest_host=8, topologies=FLAT, torus=V5E_TORUS),
    "TPU v5": Chip(
        "v5p", 459e12, 2765e9, 95e9, "v5p", cores=2, topologies=(*CUBES, "16x16x16", "16x16x24"), torus=V5P_TORUS
    ),
    "TPU v6 lite": Chip("v6e", 918e12, 1640e9, 32e9, "v6e", largest_host=8, topologies=FLAT, torus=V6E_TORUS),
    "NVIDIA A100": Chip("A100", 312e12, 2039e9, 80e9),
    "NVIDIA H100": Chip("H100", 989e12, 3350e9, 80e9),
    "NVIDIA H200": Chip("H200", 989e12, 4800e9, 141e9),
}
"""By the start of jax's `device_kind`; the longest match counts."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, or None where its peak isn't known (CPUs, others)."""
    matches = [kind for kind in CHIPS if device_kind.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None


def chip_named(name: str) -> Chip | None:
    """The chip that people call `name`, such as "v5p"; None for an unknown name."""
    return next((chip for chip in CHIPS.values() if chip.name == name), None)
