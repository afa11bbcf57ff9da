"""Prints a line of JSON for each of the paper's experts: a depth's gradient on a tape, compiled for a topology.

A process of its own; arguments: TOPOLOGY, and the FOLDER that XLA_FLAGS has it dump to. Keys: `name`; `temporary` bytes
of HBM, by the buffer assignment (memory_analysis() counts fragmentation twice); `copies`, the operations in the HLO
that make something as large as all weights of a kind out of it; `kernels`.
"""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.benchmarks.expert_cases import CHOICES, HIDDEN, LINEAR, PAPER, TOKENS
from dreamer_jax.planning.memory import reserved_bytes
from dreamer_jax.planning.topology import devices_of, parse_topology
from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.expert_mlp import ExpertMLP

EXPERTS, PROJECTIONS = ExpertMLP("pallas"), ExpertLinear("pallas")
KERNELS = (
    r"expert_mlp_forward|expert_mlp_input_gradient|expert_weight_gradient|dispatch_slots|expert_linear_[a-z_]*[a-z]"
)


def mlp_step(x, indices, weights, gate_up, down, d_out, tape):
    """Value and gradients; the weights' go to the tape."""

    def operation(x, weights, tape):
        return EXPERTS(x, indices, weights, gate_up, down, tape)

    out, vjp = jax.vjp(operation, x, weights, tape)
    return out, vjp(d_out)


def linear_step(x, index, score, routed, shared, d_out, tape):
    """The same of the attention MoE."""

    def operation(x, score, tape):
        return PROJECTIONS(x, index, score, routed, shared, tape)

    out, vjp = jax.vjp(operation, x, score, tape)
    return out, vjp(d_out)


def copies(text: str, sizes: str) -> list[str]:
    """Lines of HLO that copy, convert or add up an array of weights [sizes]."""
    made = rf"= \(?(bf16|f32)\[{sizes}\][^=]* (copy|copy-start|transpose|convert|add)\("
    return [line.strip()[:160] for line in text.splitlines() if re.search(made, line)]


def main(topology: str, folder: Path) -> None:
    """Compile for one device of it."""
    device = devices_of(parse_topology(topology))[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def like(tape):
        return jax.tree.map(lambda leaf: of(*leaf.shape, dtype=leaf.dtype), tape)

    def report(name, step, arguments, sizes):
        jax.jit(step, donate_argnums=6).lower(*arguments).compile()
        [program] = folder.glob("*_step*after_optimizations.txt")
        [assignment] = folder.glob("*_step*after_optimizations-buffer-assignment.txt")
        text, temporary = program.read_text(), reserved_bytes(assignment.read_text())
        for path in (program, assignment):  # the next ones are then the only ones
            path.unlink()
        found = sorted(set(re.findall(KERNELS, text)))
        print(json.dumps({"name": name, "temporary": temporary, "copies": copies(text, sizes), "kernels": found}))

    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([device]), ("chip",)).abstract_mesh):
        for experts, size in PAPER:
            x, matrices = of(TOKENS, HIDDEN), (of(experts, 2 * size, HIDDEN), of(experts, size, HIDDEN))
            pairs = TOKENS, CHOICES
            chosen = of(*pairs, dtype=jnp.int32), of(*pairs, dtype=jnp.float32)
            tape = jax.eval_shape(lambda: EXPERTS.start_tape(pairs, matrices[0].shape, x.dtype))  # noqa: B023
            arguments = x, *chosen, *matrices, x, like(tape)
            report(f"mlp {experts} {size}", mlp_step, arguments, rf"{experts},[\d,]*{HIDDEN}")
        for experts, inward, outward in LINEAR:
            x, routed, shared = of(TOKENS, inward), of(experts, inward, outward), of(inward, outward)
            chosen = of(TOKENS, dtype=jnp.int32), of(TOKENS, dtype=jnp.float32)
            tape = jax.eval_shape(lambda: PROJECTIONS.start_tape(TOKENS, routed.shape, x.dtype))  # noqa: B023
            arguments = x, *chosen, routed, shared, of(TOKENS, outward), like(tape)
            name = f"linear {experts} {inward} {outward}"
            report(name, linear_step, arguments, rf"{experts},(1,)?{inward},{outward}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
