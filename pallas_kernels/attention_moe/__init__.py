"""Attention MoE: the linear expert a token selected, plus the shared one (Eq. 7-8)."""

from pallas_kernels.attention_moe.api import expert_linear, start_tape
from pallas_kernels.attention_moe.shapes import Tiles

__all__ = ["Tiles", "expert_linear", "start_tape"]
