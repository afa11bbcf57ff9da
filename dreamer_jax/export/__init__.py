"""Runs as folders that PyTorch and transformers load, verified against the JAX model, and the way back."""

from importlib import resources


def modeling_file() -> bytes:
    """The one file of PyTorch code that every folder holds."""
    return resources.files(__name__).joinpath("modeling_dreamer.py").read_bytes()
