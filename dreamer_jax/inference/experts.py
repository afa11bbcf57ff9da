"""Linear and MLP experts for any number of tokens, forward only.

On a CPU the weights are read where they lie, expert after expert in a loop: gathering them first, as batched products
need, costs several times more than the products themselves (docs/benchmarks.md). There every matrix lies with its
outputs as rows, since XLA fuses looking up such a matrix into its product with a single row; of one that lies the
other way it makes a copy first. Elsewhere the operations of training serve, kernels where there are some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dreamer_jax.config.values import Implementation
from dreamer_jax.model import resolve_operations
from pallas_kernels.dispatch import blocks_of, plan_dispatch, rows_of
from pallas_kernels.tiles import generation

BLOCKED = 8
"""Mean rows of an expert from which on they are computed in blocks; below, one by one."""
LARGEST_BLOCK = 64


def arrange(weight: jax.Array, implementation: Implementation = "auto") -> jax.Array:
    """Matrices [G, a, b] as `linear` and `mlp` (its `down`) want them here: [G, b, a] on a CPU, else unchanged."""
    return jnp.swapaxes(weight, 1, 2) if _in_place(implementation) else weight


def linear(x: jax.Array, index: jax.Array, weight: jax.Array, implementation: Implementation = "auto") -> jax.Array:
    """x times the matrix of each row's expert.

    Args:
        x: [T, a].
        index: [T] int32, or a scalar for all rows.
        weight: [G, a, b], arranged.
        implementation: as of `DreamerConfig`.

    Returns:
        [T, b].
    """
    if not _in_place(implementation):
        if index.ndim == 0:
            return x @ _at(weight, index)
        ones, nothing = jnp.ones(x.shape[0], jnp.float32), jnp.zeros(weight.shape[1:], weight.dtype)
        return resolve_operations(implementation).expert_linear(x, index, ones, weight, nothing)

    def expert(rows: jax.Array, e: jax.Array) -> jax.Array:
        return rows @ _at(weight, e).T

    if index.ndim == 0:
        return expert(x, index)
    return _by_expert(x, index[:, None], weight.shape[0], weight.shape[0], weight.shape[1], expert)[:, 0]


def mlp(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    implementation: Implementation = "auto",
    among: int | None = None,
) -> jax.Array:
    """Same contract as `pallas_kernels.expert_mlp.expert_mlp`, but for the arranged `down`.

    A pair whose index is E has no expert here (another device has it) and contributes nothing.

    Args:
        x, indices, weights, gate_up, down: as there; `down` arranged.
        implementation: as of `DreamerConfig`.
        among: how many of the E experts these rows choose from, where it is fewer: one layer's of all.
    """
    if not _in_place(implementation):
        return resolve_operations(implementation).expert_mlp(x, indices, weights, gate_up, down)

    def expert(rows: jax.Array, e: jax.Array) -> jax.Array:
        gate, up = jnp.split(rows @ _at(gate_up, e).T, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ _at(down, e).T

    num_experts = gate_up.shape[0]
    values = _by_expert(x, indices, num_experts, among or num_experts, x.shape[1], expert)
    shares = jnp.where(indices < num_experts, weights, 0).astype(x.dtype)
    # Spelt out: XLA's CPU backend takes ten times longer for a sum over this axis.
    return functools.reduce(jnp.add, (values[:, j] * shares[:, j, None] for j in range(indices.shape[1])))


def _in_place(implementation: Implementation) -> bool:
    """Whether this is for a CPU, and not to try kernels on one."""
    return implementation != "pallas" and jax.default_backend() == "cpu" and generation() is None


def _by_expert(
    x: jax.Array,
    indices: jax.Array,
    num_experts: int,
    among: int,
    size: int,
    expert: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """What the selected experts [T, k] make of each row [T, a]: [T, k, size].

    `expert` takes rows [b, a] and the number of their expert to [b, size].
    """
    tokens, active = indices.shape
    mean = indices.size // among
    if mean < BLOCKED:
        return _row_by_row(x, indices, num_experts, size, expert)
    plan = plan_dispatch(indices, num_experts, min(LARGEST_BLOCK, 1 << (mean - 1).bit_length()))
    rows = blocks_of(x, plan)  # [N, b, a]

    def block(n: jax.Array, out: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(out, expert(_at(rows, n), plan.block_expert[n]), n, 0)

    empty = jnp.zeros((*rows.shape[:2], size), x.dtype)
    return rows_of(jax.lax.fori_loop(0, plan.used_blocks, block, empty), plan).reshape(tokens, active, size)


def _row_by_row(x: jax.Array, indices: jax.Array, num_experts: int, size: int, expert: Callable) -> jax.Array:
    """`_by_expert` for few rows. Those of one expert come one after the other: its weights stay in the cache."""
    tokens, active = indices.shape
    flat = indices.reshape(-1)
    order = jnp.argsort(flat)  # pairs without an expert come last

    def pair(n: jax.Array, out: jax.Array) -> jax.Array:
        row = _at(order, n)
        value = expert(_at(x, row // active)[None], _at(flat, row))
        return jax.lax.dynamic_update_index_in_dim(out, value, row, 0, allow_negative_indices=False)

    out = jax.lax.fori_loop(0, jnp.sum(flat < num_experts), pair, jnp.zeros((flat.size, size), x.dtype))
    return out.reshape(tokens, active, size)


def _at(rows: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False, allow_negative_indices=False)
