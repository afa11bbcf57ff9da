"""The one table of chips: peak bfloat16 matrix rate, memory bandwidth and memory, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One accelerator chip.

    Attributes:
        name: as people write it.
        peak_flops: dense bfloat16 FLOP/s.
        bandwidth: bytes/s of its memory.
        memory: bytes.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory: float


CHIPS = {
    "TPU v4": Chip("v4", 275e12, 1228e9, 32e9),
    "TPU v5 lite": Chip("v5e", 197e12, 819e9, 16e9),
    "TPU v5": Chip("v5p", 459e12, 2765e9, 95e9),
    "TPU v6 lite": Chip("v6e", 918e12, 1640e9, 32e9),
    "NVIDIA A100": Chip("A100", 312e12, 2039e9, 80e9),
    "NVIDIA H100": Chip("H100", 989e12, 3350e9, 80e9),
    "NVIDIA H200": Chip("H200", 989e12, 4800e9, 141e9),
}
"""By the start of jax's `device_kind`; the longest match counts."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, or None where its peak isn't known (CPUs, others)."""
    matches = [kind for kind in CHIPS if device_kind.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None
