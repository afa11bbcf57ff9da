"""The expert MLP where the weights lie: a CPU's form for decoding, forward only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.in_place import at, by_expert


def expert_mlp(
    x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array, among: int | None
) -> jax.Array:
    """Same contract as `ExpertMLP`, but for the transposed `down` [E, h, F].

    Args:
        x, indices, weights, gate_up, down: as there.
        among: how many of the E experts these rows choose from, where it is fewer: one layer's of all.
    """

    def expert(rows: jax.Array, e: jax.Array) -> jax.Array:
        gate, up = jnp.split(rows @ at(gate_up, e).T, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ at(down, e).T

    num_experts = gate_up.shape[0]
    values = by_expert(x, indices, num_experts, among or num_experts, x.shape[1], expert)
    shares = jnp.where(indices < num_experts, weights, 0).astype(x.dtype)
    # Spelt out: XLA's CPU backend takes ten times longer for a sum over this axis.
    return functools.reduce(jnp.add, (values[:, j] * shares[:, j, None] for j in range(indices.shape[1])))
