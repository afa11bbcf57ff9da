"""Prints the HLO of the gradient of a small DR+DA trunk with kernels, compiled for a topology; a process of its own.

Its words: TOPOLOGY [KEY=NUMBER ...], settings of the model. The first line is the bytes of temporary memory.
"""

import dataclasses
import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.families import build, forward
from dreamer_jax.planning.topology import devices_of, parse_topology

CONFIG = DreamerConfig(
    depth=6,
    hidden_size=256,
    vocab_size=512,
    sa_heads=2,
    sa_kv_heads=1,
    sa_head_size=128,
    da_head_size=128,
    num_experts=8,
    experts_per_token=2,
    expert_size=128,
    router_size=128,
    implementation="pallas",
)


def loss(family, params, model_state, tokens):
    """Any scalar of the final hidden states."""
    passed = forward(family, params, model_state, {"tokens": tokens})
    hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
    return jnp.sum(hidden.astype(jnp.float32))


def main(topology: str, *changes: str) -> None:
    """Compile for one device of it."""
    numbers = {key: int(number) for key, _, number in (change.partition("=") for change in changes)}
    family = build(dataclasses.replace(CONFIG, **numbers))
    device = devices_of(parse_topology(topology))[0]
    place = jax.sharding.SingleDeviceSharding(device)
    shapes = *nn.meta.unbox(family.shapes), jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.grad(functools.partial(loss, family))).lower(*arguments)
    program = lowered.compile()
    print(program.memory_analysis().temp_size_in_bytes, program.as_text(), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
