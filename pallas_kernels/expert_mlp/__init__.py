"""Expert attention's values: the SwiGLU experts a token selected, weighted and summed."""

from pallas_kernels.expert_mlp.api import expert_mlp

__all__ = ["expert_mlp"]
