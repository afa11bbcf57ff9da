"""The one table of tiles: what every kernel takes on each TPU generation. No tile stands in a configuration.

The generation is that of the mesh being compiled for, when there is one (ahead-of-time compilation, shard_map), or
of the default device. Kernels that are interpreted on a CPU take `INTERPRETED`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True)
class Generation:
    """A TPU generation as the kernels see it.

    Attributes:
        name: as people write it.
        cores: cores that share one kernel launch (megacore): a grid needs a parallel dimension of at least as many.
        vmem: bytes of vector memory a kernel may ask for on each core, some left for the compiler.
        memory: bytes of HBM of a chip.
        depth_slots: cache slots of a block of depth attention backward; over a window, those walked at once both ways.
        depth_slots_forward: of a block forward. What a block has beyond the depth is fetched in vain, but more slots at
            once are fewer bundles.
        depth_forward, depth_backward: tokens of such a block, and those of them that the inner loop works on at once.
        sequence_block: queries and keys of a block of sequence attention.
        sequence_head: the largest head size that a core has room for in blocks so large, in 16 bits; larger ones have
            smaller.
        expert_rows: (mean rows an expert gets, rows of a block) in ascending order: the last one that is reached
            counts. A block belongs to one expert; larger ones fill the matrix unit better and waste more padding.
        int8: whether matrices in eight bits are faster. On v4 the compiler's unpacking of them takes longer than
            reading twice the bytes (docs/kernels.md).
        spills: whether float32 matrices may not fit the registers.
    """

    name: str
    cores: int
    vmem: int
    memory: float = 0
    depth_slots: int = 4
    depth_slots_forward: int = 2
    depth_forward: tuple[int, int] = (1024, 256)
    depth_backward: tuple[int, int] = (1024, 256)
    sequence_block: int = 1024
    sequence_head: int = 256
    expert_rows: tuple[tuple[int, int], ...] = ((0, 16), (24, 32), (48, 64), (96, 128), (768, 256))
    int8: bool = True
    spills: bool = True

    def spilled(self, dtype: jnp.dtype | str, matrices: int) -> int:
        """`matrices`, as many at most as a kernel of experts spills out of registers in float32; otherwise none."""
        return matrices if self.spills and jnp.dtype(dtype).itemsize == 4 else 0


MIB = 1 << 20
GENERATIONS = {
    "v4": Generation(
        "v4", cores=2, vmem=15 * MIB, memory=32e9, depth_backward=(512, 128), sequence_head=128, int8=False
    ),
    "v5e": Generation("v5e", cores=1, vmem=100 * MIB, memory=16e9, depth_slots=2),
    "v5p": Generation("v5p", cores=2, vmem=56 * MIB, memory=95e9),
    "v6e": Generation(
        "v6e",
        cores=1,
        vmem=100 * MIB,
        memory=32e9,
        depth_slots=2,
        expert_rows=((0, 16), (24, 32), (48, 64), (96, 128), (512, 256)),
    ),
}
INTERPRETED = Generation("interpreted", cores=2, vmem=1 << 40, spills=False)


def generation() -> Generation | None:
    """The TPU generation that the code being traced is for; None elsewhere or for one this table doesn't know."""
    if not pltpu.is_tpu_device():
        return None
    return GENERATIONS.get(str(pltpu.get_tpu_info().chip_version))
