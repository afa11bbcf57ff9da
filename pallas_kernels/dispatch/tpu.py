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

CHUNK = 256
LANES, SUBLANES = 128, 16


def slots(expert: jax.Array, first_slot: jax.Array, *, interpret) -> jax.Array:
    """The slot of each pair: its expert's first, plus the number of earlier pairs of that expert.

    Args:
        expert: [P] int32, below 2^24 of them; numbers of E and more get an unspecified slot.
        first_slot: [E] int32, each expert's first slot, below 2^24.
        interpret: as `pallas_call` takes it.

    Returns:
        [P] int32.
    """
    pairs, num_experts = expert.size, first_slot.size
    chunks, padded = -(-pairs // CHUNK), -(-num_experts // SUBLANES) * SUBLANES
    rows = jnp.full(chunks * CHUNK, num_experts, jnp.int32).at[:pairs].set(expert).reshape(chunks, 1, CHUNK)
    first = jnp.zeros((padded, LANES), jnp.float32).at[:num_experts].set(first_slot[:, None].astype(jnp.float32))
    chunk = pl.BlockSpec((1, 1, CHUNK), lambda i: (i, 0, 0))
    found = pl.pallas_call(
        _kernel,
        grid=(chunks,),
        in_specs=[chunk, pl.BlockSpec((padded, LANES), lambda i: (0, 0))],
        out_specs=chunk,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.int32),
        scratch_shapes=[pltpu.VMEM((padded, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows.size * padded * CHUNK, bytes_accessed=8 * rows.size, transcendentals=0
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="dispatch_slots",
    )(rows, first)
    return found.reshape(-1)[:pairs]


def _kernel(expert_ref, first_ref, slot_ref, next_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        next_ref[...] = first_ref[...]

    experts = next_ref.shape[0]
    of_expert = jax.lax.broadcasted_iota(jnp.int32, (experts, CHUNK), 0) == expert_ref[0]  # [E, pairs]
    ones = of_expert.astype(jnp.bfloat16)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    earlier = jnp.dot(ones, (row < column).astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    slot = earlier + jnp.concatenate([next_ref[...]] * (CHUNK // LANES), axis=1)
    slot_ref[0] = jnp.sum(jnp.where(of_expert, slot, 0.0), axis=0, keepdims=True).astype(jnp.int32)
    # Times a matrix of ones, the counts come out in every lane, as they are kept.
    next_ref[...] += jnp.dot(ones, jnp.ones((CHUNK, LANES), jnp.bfloat16), preferred_element_type=jnp.float32)
