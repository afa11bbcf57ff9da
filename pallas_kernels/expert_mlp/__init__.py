"""Expert attention's values: the SwiGLU experts a token selected, weighted and summed."""

from pallas_kernels.expert_mlp.api import expert_mlp, settle, start_tape
from pallas_kernels.expert_mlp.tape import Tape

__all__ = ["Tape", "expert_mlp", "settle", "start_tape"]
