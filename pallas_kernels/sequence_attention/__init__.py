"""Sequence attention: tokens over earlier tokens of their document."""

from pallas_kernels.sequence_attention.api import SequenceAttention

__all__ = ["SequenceAttention"]
