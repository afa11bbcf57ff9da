"""Devices: the mesh a configuration asks for, what each chip can do, and everything that travels between devices."""

from typing import TYPE_CHECKING, Any

from dreamer_jax.parallel.chips import Chip, chip_of

if TYPE_CHECKING:
    from dreamer_jax.parallel.layout import Layout, parameter_layouts
    from dreamer_jax.parallel.mesh import batch_spec, make_mesh

__all__ = ["Chip", "Layout", "batch_spec", "chip_of", "make_mesh", "parameter_layouts"]

_HOMES = {"Layout": "layout", "parameter_layouts": "layout", "batch_spec": "mesh", "make_mesh": "mesh"}


def __getattr__(name: str) -> Any:
    """What needs jax is imported when it is asked for: the launcher reads the chip table on machines without jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
