"""Sequence attention: a token over the earlier ones of its document."""

from pallas_kernels.sequence_attention.api import sequence_attention

__all__ = ["sequence_attention"]
