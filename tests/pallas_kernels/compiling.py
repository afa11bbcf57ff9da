"""Code traced for chips that this machine doesn't have."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
"""Generation -> the name that jax has for its chips."""


def compiling_for(kind):
    """As if for a mesh of chips of this kind; None: for this machine."""
    device = None if kind is None else AbstractDevice(kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("chip",), axis_types=(AxisType.Auto,), abstract_device=device)
    )
