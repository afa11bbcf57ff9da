"""Prints a line of JSON for one depth's gradient of the expert MLP on a tape, compiled for a topology; its own process.

Arguments: TOPOLOGY E F. Keys: `temporary` bytes; `copies`, the copies in the HLO of anything as large as a weight.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.planning.topology import devices_of, parse_topology
from pallas_kernels import expert_mlp

TOKENS, CHOICES, HIDDEN = 32768, 8, 1024


def step(x, indices, weights, gate_up, down, d_out, tape):
    """Value and gradients; the weights' go to the tape."""

    def operation(x, weights, tape):
        return expert_mlp.expert_mlp(x, indices, weights, gate_up, down, tape)

    out, vjp = jax.vjp(operation, x, weights, tape)
    return out, vjp(d_out)


def main(topology: str, experts: int, size: int) -> None:
    """Compile for one device of it."""
    device = devices_of(parse_topology(topology))[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    x, matrices = of((TOKENS, HIDDEN)), (of((experts, 2 * size, HIDDEN)), of((experts, size, HIDDEN)))
    pairs = (TOKENS, CHOICES)
    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([device]), ("chip",)).abstract_mesh):
        tape = jax.eval_shape(lambda: expert_mlp.start_tape(pairs, matrices[0].shape, x.dtype))
        tape = jax.tree.map(lambda leaf: of(leaf.shape, leaf.dtype), tape)
        arguments = x, of(pairs, jnp.int32), of(pairs, jnp.float32), *matrices, x, tape
        program = jax.jit(step, donate_argnums=6).lower(*arguments).compile()
    weight = rf"= \(?(bf16|f32)\[{experts},[\d,]*{HIDDEN}\]\S* (copy|copy-start|transpose|convert|add)\("
    copies = [line.strip()[:160] for line in program.as_text().splitlines() if re.search(weight, line)]
    names = r"expert_mlp_forward|expert_mlp_input_gradient|expert_weight_gradient"
    kernels = sorted(set(re.findall(names, program.as_text())))
    temporary = program.memory_analysis().temp_size_in_bytes
    print(json.dumps({"temporary": temporary, "copies": copies, "kernels": kernels}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
