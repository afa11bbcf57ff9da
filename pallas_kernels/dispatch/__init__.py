"""Rows to experts and back: a plan made once by sorting, and gathers in both directions."""

from pallas_kernels.dispatch.api import Dispatch, block_size_for, blocks_of, plan_dispatch, rows_of

__all__ = ["Dispatch", "block_size_for", "blocks_of", "plan_dispatch", "rows_of"]
