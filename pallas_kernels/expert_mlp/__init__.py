"""Expert attention's values: the SwiGLU experts a token selected, weighted and summed."""

from pallas_kernels.expert_mlp.api import ExpertMLP
from pallas_kernels.expert_mlp.tape import ExpertTape

__all__ = ["ExpertMLP", "ExpertTape"]
