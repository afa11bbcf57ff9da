"""Attention MoE: the linear expert a token selected, plus the shared one (Eq. 7-8)."""

from pallas_kernels.attention_moe.api import ExpertLinear
from pallas_kernels.attention_moe.tape import LinearTape

__all__ = ["ExpertLinear", "LinearTape"]
