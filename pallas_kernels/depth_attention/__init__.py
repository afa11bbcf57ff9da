"""Depth attention: a token over its own depths."""

from pallas_kernels.depth_attention.api import depth_attention, start_tape
from pallas_kernels.depth_attention.cache import DepthCache, empty_cache, write_slot

__all__ = ["DepthCache", "depth_attention", "empty_cache", "start_tape", "write_slot"]
