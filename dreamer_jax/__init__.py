"""Dreamer-JAX: depth-recurrent attention mixtures in JAX/Flax for TPU pods."""

__version__ = "0.1.0"
