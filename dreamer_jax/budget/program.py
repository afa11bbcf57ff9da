"""The second count: parameters and matrix products read from the program itself, to check the analytic one.

The model is initialised and lowered with shapes only (nothing is allocated or compiled), with operations in place of
the shipped ones that compute the same values by exactly the model's products: the shipped expert computation pads
experts to blocks, which is work of the machine, not of the model. Attention is causal by masking, so in the program
every token meets S keys and every depth L: the analytic count takes these as its contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from dreamer_jax.blocks.operations import Operations, Plain
from dreamer_jax.budget import analytic, lowered
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, build, forward, initialise
from pallas_kernels.depth_attention import WHOLE, DepthCache, Window, write_slot
from pallas_kernels.depth_attention.windowed import seen


@dataclass(frozen=True)
class ProgramCount:
    """What the program holds and does: its parameters, and the FLOPs of its forward's products per token."""

    parameters: int
    flops_per_token: float


def count(config: Any, sequence_length: int, batch: int = 1, devices: int = 1) -> ProgramCount:
    """Count a model's forward over [B, S] tokens, folded (Eq. 8).

    Args:
        config: its section `model`.
        sequence_length: S; the attention of the program is dense, so its context is S.
        batch: rows B, a multiple of `devices`.
        devices: of an abstract mesh the rows are spread over; none of them has to exist.
    """
    if batch % devices:
        raise UserError(f"{batch} rows can't be spread over {devices} devices; use a multiple of {devices}")
    family = build(config, COUNTING)
    tokens = jax.ShapeDtypeStruct((batch, sequence_length), jnp.int32)
    variables = jax.eval_shape(lambda: initialise(family, jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables[0]))
    program = _lower(_logits_of(family), variables, tokens, devices)
    return ProgramCount(parameters, lowered.matmul_flops(program) / (batch * sequence_length))


def expected(config: Any, sequence_length: int, batch: int = 1) -> ProgramCount:
    """What the analytic count says of the same program."""
    family = build(config)
    flops = analytic.matmul_flops(family, context=sequence_length, depth_context=family.depth)
    once = analytic.pass_flops(family) / (batch * sequence_length)
    return ProgramCount(int(analytic.total(analytic.parameters(family))), analytic.total(flops) + once)


def _logits_of(family: Family) -> Callable[..., jax.Array]:
    def logits(variables, tokens):
        passed = forward(family, variables[0], variables[1], {"tokens": tokens})
        hidden, _ = family.readout(variables[0], passed.state, passed.memory, passed.context)
        return family.logits(variables[0], hidden)

    return logits


def _lower(logits: Callable, variables, tokens: jax.ShapeDtypeStruct, devices: int) -> jax.stages.Lowered:
    if devices == 1:
        return jax.jit(logits).lower(variables, tokens)
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def on_mesh(leaf, *axes):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    replicated = jax.tree.map(on_mesh, variables)
    traced = jax.jit(logits).trace(replicated, on_mesh(tokens, "data"))
    return traced.lower(lowering_platforms=("cpu",))


def _sequence_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Sequence attention by two products over all S keys, masked (the shipped one may skip masked blocks)."""
    batch, length, _, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, size)
    logits = jnp.einsum("bqgnd,bkgd->bgnqk", grouped, k) * size**-0.5
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = (same_document & jnp.tril(jnp.ones((length, length), bool)))[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bgnqk,bkgd->bqgnd", weights, v).reshape(q.shape)


def _depth_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: DepthCache, depth: jax.Array, window: Window = WHOLE
):
    """Depth attention by two products over all L slots of the cache, or as many as a window has (the shipped one
    multiplies and reduces)."""
    cache, looked_at = write_slot(cache, k, v, depth), None
    if not window.whole:
        looked_at, depth = seen(cache, depth, window), depth // window.dilation
    keys, values = (looked_at or cache).heads(q.shape[-1])  # [L, T, kv, d]
    slots, tokens, kv_heads, size = keys.shape
    grouped = q.reshape(tokens, kv_heads, -1, size)
    logits = jnp.einsum("tgnd,ltgd->tgnl", grouped, keys) * size**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(slots) <= depth, logits, -jnp.inf), axis=-1)
    return jnp.einsum("tgnl,ltgd->tgnd", weights, values).reshape(q.shape), cache


def _expert_mlp(x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Each token's k experts gathered and multiplied; their weighted sum is elementwise work, not a product."""
    gate, up = jnp.split(jnp.einsum("th,tkfh->tkf", x, gate_up[indices]), 2, axis=-1)
    values = jnp.einsum("tkf,tkfh->tkh", jax.nn.silu(gate) * up, down[indices])
    return jnp.sum(values * weights.astype(values.dtype)[..., None], axis=1)


def _expert_linear(
    x: jax.Array, index: jax.Array, score: jax.Array | None, routed: jax.Array, shared: jax.Array | None
) -> jax.Array:
    """Eq. 8: one product with the folded expert of each token."""
    product = jnp.einsum("ta,tab->tb", x, (routed if shared is None else routed + shared)[index])
    return product if score is None else score.astype(x.dtype)[:, None] * product


COUNTING = Operations(*map(Plain, (_sequence_attention, _depth_attention, _expert_mlp, _expert_linear)))
"""Same values as the shipped operations, by the products that docs/budget.md counts and no others."""
