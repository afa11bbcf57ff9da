"""The expert MLP where the weights lie: a CPU's form for decoding, forward only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.in_place import by_expert
from pallas_kernels.weights import OutputRows


def expert_mlp(
    x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: OutputRows, down: OutputRows, among: int | None
) -> jax.Array:
    """Same contract as `ExpertMLP`.

    Args:
        x, indices, weights: as there.
        gate_up, down: its [E, 2F, h] and, transposed, [E, h, F].
        among: how many of the E experts these rows choose from, where it is fewer: one layer's of all.
    """

    def expert(rows: jax.Array, e: jax.Array) -> jax.Array:
        gate, up = jnp.split(gate_up.product(rows, e), 2, axis=-1)
        return down.product(jax.nn.silu(gate) * up, e)

    num_experts = gate_up.shape[0]
    values = by_expert(x, indices, num_experts, among or num_experts, x.shape[1], expert)
    shares = jnp.where(indices < num_experts, weights, 0).astype(x.dtype)
    # Spelt out: XLA's CPU backend takes ten times longer for a sum over this axis.
    return functools.reduce(jnp.add, (values[:, j] * shares[:, j, None] for j in range(indices.shape[1])))
