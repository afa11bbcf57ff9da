"""Depth attention: a token over its own depths."""

from pallas_kernels.depth_attention.api import DepthAttention
from pallas_kernels.depth_attention.cache import DepthCache, Ring, empty_cache, write_slot
from pallas_kernels.depth_attention.window import WHOLE, Window

__all__ = ["WHOLE", "DepthAttention", "DepthCache", "Ring", "Window", "empty_cache", "write_slot"]
