"""Devices: the mesh a configuration asks for, and what each chip can do."""

from dreamer_jax.parallel.chips import Chip, chip_of
from dreamer_jax.parallel.mesh import make_mesh

__all__ = ["Chip", "chip_of", "make_mesh"]
