"""Prints the HLO of the gradient of a small DR+DA trunk with kernels, compiled for a topology; a process of its own."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model import Dreamer, initialise
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


def loss(params, bias, tokens):
    """Any scalar of the final hidden states."""
    variables = {"params": params, "balancing": {"bias": bias}}
    return jnp.sum(Dreamer(CONFIG).apply(variables, tokens, method="trunk")[0].astype(jnp.float32))  # type: ignore


def main(topology: str) -> None:
    """Compile for one device of it."""
    device = devices_of(parse_topology(topology))[0]
    place = jax.sharding.SingleDeviceSharding(device)
    shapes = (
        *jax.eval_shape(lambda: initialise(CONFIG, jax.random.key(0))),
        jax.ShapeDtypeStruct((4, 2048), jnp.int32),
    )
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.grad(loss)).lower(*arguments)
    print(lowered.compile().as_text())


if __name__ == "__main__":
    main(sys.argv[1])
