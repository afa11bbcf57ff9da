"""Dreamer-JAX: depth-recurrent attention mixtures in JAX/Flax for TPU pods.

    model = dreamer_jax.load("runs/x")

See `load` and `Model` (dreamer_jax/model.py). They are imported when they are asked for, because that takes jax, which
the command line and the launcher can do without.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamer_jax.model import Model, load

__version__ = "0.2.0"
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in ("Model", "load"):
        raise AttributeError(f"module 'dreamer_jax' has no attribute {name!r}")
    from dreamer_jax import model

    return getattr(model, name)
