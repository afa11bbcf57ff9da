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
        torus: of TPUs, how a slice is wired.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    torus: Torus | None = None


CHIPS = {
    "TPU v4": Chip("v4", 275e12, 1228e9, 32e9, Torus(3, 45e9, 4, 6.25e9)),
    "TPU v5 lite": Chip("v5e", 197e12, 819e9, 16e9, Torus(2, 45e9, 16, 3.125e9)),
    "TPU v5": Chip("v5p", 459e12, 2765e9, 95e9, Torus(3, 90e9, 4, 6.25e9)),
    "TPU v6 lite": Chip("v6e", 918e12, 1640e9, 32e9, Torus(2, 90e9, 16, 12.5e9)),
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
