"""Devices: the mesh a configuration asks for, where parameters lie on it, and what travels between devices."""

from dreamer_jax.parallel.layout import Layout, parameter_layouts
from dreamer_jax.parallel.mesh import batch_spec, make_mesh

__all__ = ["Layout", "batch_spec", "make_mesh", "parameter_layouts"]
