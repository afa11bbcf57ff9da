"""Depth attention: a token over its own depths."""

from pallas_kernels.depth_attention.api import DepthAttention
from pallas_kernels.depth_attention.cache import DepthCache, empty_cache, write_slot

__all__ = ["DepthAttention", "DepthCache", "empty_cache", "write_slot"]
