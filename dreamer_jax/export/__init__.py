"""Runs as folders that PyTorch and transformers load, verified against the JAX model, and the way back."""

from importlib import resources


def modeling_file(name: str = "modeling_dreamer.py") -> bytes:
    """The one file of PyTorch code that every folder of a form holds."""
    return resources.files(__name__).joinpath(name).read_bytes()
