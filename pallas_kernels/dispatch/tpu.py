"""The counting sort's slots on a TPU: how many earlier pairs chose the same expert, by triangular matrix products.

A chunk of pairs is compared with all experts at once, giving ones [E, pairs]. Times a strictly upper triangular matrix
of ones, that counts the earlier pairs of the chunk; a running total counts the chunks before. All counts are whole
numbers below 2^24, exact in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch.stream import compile_for
from pallas_kernels.tiles import Generation

CHUNK, CHUNKS = 128, 8  # pairs that are counted at once, and how often a grid step does that
LANES, SUBLANES = 128, 16


def slots(expert: jax.Array, first_slot: jax.Array, *, target: Generation) -> jax.Array:
    """The slot of each pair: its expert's first, plus the number of earlier pairs of that expert.

    Every core counts the pairs of its own share of the experts.

    Args:
        expert: [P] int32, below 2^24 of them; numbers of E and more get an unspecified slot.
        first_slot: [E] int32, each expert's first slot, below 2^24.
        target: what is compiled for.

    Returns:
        [P] int32.
    """
    pairs, num_experts = expert.size, first_slot.size
    steps, share = -(-pairs // (CHUNKS * CHUNK)), -(-num_experts // (SUBLANES * target.cores)) * SUBLANES
    padded = share * target.cores
    rows = jnp.full(steps * CHUNKS * CHUNK, num_experts, jnp.int32).at[:pairs].set(expert)
    rows = rows.reshape(steps * CHUNKS, CHUNK)
    first = jnp.zeros((padded, LANES), jnp.float32).at[:num_experts].set(first_slot[:, None].astype(jnp.float32))
    found = pl.pallas_call(
        _kernel,
        grid=(target.cores, steps),
        in_specs=[
            pl.BlockSpec((CHUNKS, CHUNK), lambda core, i: (i, 0)),
            pl.BlockSpec((share, LANES), lambda core, i: (core, 0)),
        ],
        out_specs=pl.BlockSpec((1, CHUNKS, CHUNK), lambda core, i: (core, i, 0)),
        out_shape=jax.ShapeDtypeStruct((target.cores, *rows.shape), jnp.int32),
        scratch_shapes=[pltpu.VMEM((share, LANES), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=4 * rows.size * padded * CHUNK, bytes_accessed=8 * rows.size, transcendentals=0
        ),
        name="dispatch_slots",
        **compile_for(target),
    )(rows, first)
    return jnp.sum(found, axis=0).reshape(-1)[:pairs]  # zero from the cores whose expert it isn't


def _kernel(expert_ref, first_ref, slot_ref, next_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        next_ref[...] = first_ref[...]

    experts = next_ref.shape[0]
    own = jax.lax.broadcasted_iota(jnp.int32, (experts, CHUNK), 0) + pl.program_id(0) * experts
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    triangle, all_ones = (row < column).astype(jnp.bfloat16), jnp.ones((CHUNK, LANES), jnp.bfloat16)
    for chunk in range(CHUNKS):
        of_expert = own == expert_ref[chunk : chunk + 1]  # [E / cores, pairs]
        ones = of_expert.astype(jnp.bfloat16)
        slot = next_ref[...] + jnp.dot(ones, triangle, preferred_element_type=jnp.float32)
        found = jnp.sum(jnp.where(of_expert, slot, 0.0), axis=0, keepdims=True)
        slot_ref[0, chunk : chunk + 1] = found.astype(jnp.int32)
        # Times a matrix of ones, the counts come out in every lane, as they are kept.
        next_ref[...] += jnp.dot(ones, all_ones, preferred_element_type=jnp.float32)
