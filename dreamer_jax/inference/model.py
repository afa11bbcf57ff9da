"""The model as samplers see it: `embed` tokens, apply one depth to a set of positions with `step`, `readout` logits.

    state = model.embed(tokens)                                     # [B, P] tokens -> P positions a row in flight
    state, caches = model.step(state, positions, depths, caches)    # one depth further, each at its own depth
    logits = model.readout(state)                                   # [B, P, V], for positions that went deep enough

A step writes the keys and values of its positions before it attends, so a position sees itself and whatever earlier
positions have left at the same depth. Which positions to step when is the sampler's business: `engine` takes them one
token after another; nothing here requires it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.errors import UserError
from dreamer_jax.inference import experts
from dreamer_jax.inference.attention import attend_depth, attend_sequence
from dreamer_jax.inference.caches import Caches, State, write
from dreamer_jax.inference.folding import AttentionWeights, Routing, Weights, fold_weights
from dreamer_jax.model.primitives import depth_rope, rms_norm, rope
from dreamer_jax.model.routing import select

EXPERT = "expert"
"""Mesh axis that shares the experts, where there is one (see `placement`)."""


class FoldedModel(flax.struct.PyTreeNode):
    """A folded model at a depth; a pytree whose leaves are the weights, so it is passed to jitted functions whole.

    Attributes:
        weights: see `folding`.
        config: sizes, variant and compute precision.
        total_depth: L of this model's forward passes, which may differ from the trained `config.depth`.
        expert_shards: devices along the mesh axis `expert`; more than one only within `placement`.
    """

    weights: Weights
    config: DreamerConfig = flax.struct.field(pytree_node=False)
    total_depth: int = flax.struct.field(pytree_node=False)
    expert_shards: int = flax.struct.field(pytree_node=False, default=1)

    def empty_caches(self, rows: int, capacity: int) -> Caches:
        """Caches for B = `rows` sequences of at most S = `capacity` tokens."""
        config = self.config
        shape = (self.total_depth, rows, capacity, config.sa_kv_heads, config.sa_head_size)
        return Caches(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))

    def embed(self, tokens: jax.Array) -> State:
        """Tokens [B, P] int32 before the first depth."""
        config = self.config
        hidden = self.weights.embedding.at[tokens].get(mode="clip")
        if not config.depth_attention:
            return State(hidden, None, None)
        shape = (self.total_depth, *tokens.shape, config.da_kv_heads, config.da_head_size)
        return State(hidden, jnp.zeros(shape, hidden.dtype), jnp.zeros(shape, hidden.dtype))

    def step(self, state: State, positions: jax.Array, depths: jax.Array | int, caches: Caches) -> tuple[State, Caches]:
        """One depth step of a set of positions.

        Args:
            state: P positions of each row, at `depths`.
            positions: [B, P] int32, their places in their rows, all different within a row; a position outside the
                caches is computed but leaves nothing there.
            depths: l of each position, [B, P] int32, or one number for all, which is faster.
            caches: hold what earlier positions have left at these depths.

        Returns:
            The state at depths + 1, and the caches with these positions at `depths`.
        """
        return _Step(self, positions, jnp.asarray(depths, jnp.int32)).apply(state, caches)

    def readout(self, state: State) -> jax.Array:
        """Logits [B, P, V] float32 of the token after each position, from states that went through all depths."""
        hidden = state.hidden if self.config.recurrent else rms_norm(state.hidden, self.weights.last_norm)
        return jnp.einsum("bph,vh->bpv", hidden, self.weights.head, preferred_element_type=jnp.float32)


def fold(
    config: DreamerConfig,
    params: Any,
    balancing: Mapping[str, Any],
    depth: int | None = None,
    dtype: str | None = None,
) -> FoldedModel:
    """A trained model ready for inference.

    Args:
        config: of training.
        params, balancing: as `Dreamer.apply` takes them.
        depth: L of the forward passes; None for the trained one. DR takes any, LA at most the layers it has.
        dtype: compute precision, "bfloat16" or "float32"; None for `config.dtype`.

    Raises:
        UserError: the depth is impossible.
    """
    depth = config.depth if depth is None else depth
    if depth < 1:
        raise UserError(f"depth {depth}: a model needs at least one depth")
    if not config.recurrent and depth > config.depth:
        raise UserError(f"this {config.variant} model has {config.depth} layers and can't be applied at depth {depth}")
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)  # type: ignore[arg-type]
    weights = jax.jit(fold_weights, static_argnums=0)(config, params, balancing)
    return FoldedModel(weights=weights, config=config, total_depth=depth)


class _Step:
    """One depth step; holds what its parts share. Tokens are flattened, T = B * P, between the attentions."""

    def __init__(self, model: FoldedModel, positions: jax.Array, depths: jax.Array):
        self.config, self.weights, self.total_depth = model.config, model.weights, model.total_depth
        self.expert_shards = model.expert_shards
        self.positions, self.depths = positions, depths
        self.flat_depths = depths.reshape(-1) if depths.ndim else depths  # [T] or []

    def apply(self, state: State, caches: Caches) -> tuple[State, Caches]:
        config = self.config
        memory = (state.keys, state.values)

        def sa(x):
            nonlocal caches
            out, caches = self.sequence_attention(x, caches)
            return out

        def da(x):
            nonlocal memory
            if self.weights.depth is None:
                return 0
            out, memory = self.depth_attention(self.weights.depth, x, memory)
            return out

        x = state.hidden
        if config.mixing == "sequential":  # Eq. 4
            y = x + da(x)
            y = y + sa(y)
            y = y + self.expert_attention(y)
        elif config.mixing == "parallel_attention":  # Eq. 5
            y = x + da(x) + sa(x)
            y = y + self.expert_attention(y)
        else:  # Eq. 6
            y = x + da(x) + sa(x) + self.expert_attention(x)
        if config.recurrent:
            y = rms_norm(y, self.weights.last_norm)
        return State(y, *memory), caches

    def sequence_attention(self, x: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
        """[B, P, h] -> [B, P, h]; writes this depth's keys and values."""
        config, weights = self.config, self.weights.sequence
        choice, (q, k, v) = self.heads(weights, x, config.sa_heads, config.sa_kv_heads, config.sa_head_size)
        position = self.positions[..., None]
        q, k = rope(q, position, config.sa_rope_base), rope(k, position, config.sa_rope_base)
        keys = write(caches.keys, k, self.depths, self.positions)
        values = write(caches.values, v, self.depths, self.positions)
        attended = attend_sequence(q, keys, values, self.depths, self.positions)
        return self.output(weights, choice, attended), Caches(keys, values)

    def depth_attention(self, weights: AttentionWeights, x: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """[B, P, h] -> [B, P, h]; writes this depth's row of the positions' own caches."""
        config = self.config
        choice, (q, k, v) = self.heads(weights, x, config.da_heads, config.da_kv_heads, config.da_head_size)
        depths = self.depths[..., None] if self.depths.ndim else self.depths
        q = depth_rope(q, depths, jnp.int32(self.total_depth), config.depth_rope_base)
        k = depth_rope(k, depths, jnp.int32(self.total_depth), config.depth_rope_base)
        keys, values = (self.write_depth(slots, new) for slots, new in zip(memory, (k, v), strict=True))
        return self.output(weights, choice, attend_depth(q, keys, values, self.depths)), (keys, values)

    def write_depth(self, slots: jax.Array, new: jax.Array) -> jax.Array:
        """[L, B, P, kv, d] with [B, P, kv, d] at each position's depth."""
        new = new.astype(slots.dtype)
        if not self.depths.ndim:
            return jax.lax.dynamic_update_index_in_dim(slots, new, self.depths, 0)
        here = jnp.arange(slots.shape[0])[:, None, None] == self.depths
        return jnp.where(here[..., None, None], new, slots)

    def expert_attention(self, x: jax.Array) -> jax.Array:
        """[B, P, h] -> [B, P, h]."""
        config, weights = self.config, self.weights.experts
        normed = self.norm(x, weights.norm).reshape(-1, x.shape[-1])
        indices, scores = self.route(weights.routing, normed, config.experts_per_token)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
        held = -(-config.num_experts // self.expert_shards)  # of each layer, on this device
        layer = 0 if config.recurrent else self.flat_depths[:, None] if self.depths.ndim else self.depths
        rows = layer * held + indices % held
        if self.expert_shards > 1:  # the number after the last means: another device's
            rows = jnp.where(indices // held == jax.lax.axis_index(EXPERT), rows, weights.gate_up.shape[0])
        among = held if config.recurrent or not self.depths.ndim else None
        out = experts.mlp(normed, rows, shares, weights.gate_up, weights.down, config.implementation, among)
        return (jax.lax.psum(out, EXPERT) if self.expert_shards > 1 else out).reshape(x.shape)

    def heads(self, weights: AttentionWeights, x: jax.Array, heads: int, kv_heads: int, size: int):
        """Pre-norm and fused projection: (expert, score), (q [B, P, n, d], k and v [B, P, kv, d]), q and k normed."""
        flat = self.norm(x, weights.norm).reshape(-1, x.shape[-1])
        choice = None
        if weights.routing is not None:
            indices, scores = self.route(weights.routing, flat, 1)
            choice = indices[:, 0], scores[:, 0]
        qkv = self.project(flat, choice, weights.qkv).reshape(*x.shape[:2], -1, size)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        scales = (self.own(scale) for scale in (weights.q_scale, weights.k_scale))
        q_scale, k_scale = (s if s.ndim == 1 else s.reshape(*x.shape[:2], 1, size) for s in scales)
        return choice, (rms_norm(q, q_scale), rms_norm(k, k_scale), v)

    def output(self, weights: AttentionWeights, choice: Any, attended: jax.Array) -> jax.Array:
        """[B, P, n, d] -> [B, P, h]."""
        flat = attended.reshape(attended.shape[0] * attended.shape[1], -1)
        return self.project(flat, choice, weights.out).reshape(*attended.shape[:2], -1)

    def project(self, x: jax.Array, choice: Any, weight: jax.Array) -> jax.Array:
        """[T, a] -> [T, b]: the selected expert scaled by its score (Eq. 8); in LA the matrix of the depth."""
        config = self.config
        if choice is None:
            return experts.linear(x, self.flat_depths, weight, config.implementation)
        index, score = choice
        return score.astype(x.dtype)[:, None] * experts.linear(x, index, weight, config.implementation)

    def route(self, routing: Routing, x: jax.Array, active: int) -> tuple[jax.Array, jax.Array]:
        """[T, h] -> indices [T, k] int32 and sigmoid scores [T, k] float32."""
        config = self.config
        if routing.query.shape[0] == 1 or not self.depths.ndim:
            matrix = self.own(routing.query)
            query = jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
        else:
            matrices = experts.arrange(routing.query, config.implementation)
            query = experts.linear(x, self.flat_depths, matrices, config.implementation).astype(jnp.float32)
        query = rms_norm(query, self.own(routing.query_scale))
        query = depth_rope(query, self.flat_depths, jnp.int32(self.total_depth), config.depth_rope_base)
        keys = self.own(routing.keys)
        logits = jnp.einsum("tr,er->te" if keys.ndim == 2 else "tr,ter->te", query, keys, precision="highest")
        return select(logits * config.router_size**-0.5, self.own(routing.bias), active)

    def norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        own = self.own(scale)
        return rms_norm(x, own if own.ndim == 1 else own.reshape(x.shape))

    def own(self, rows: jax.Array) -> jax.Array:
        """What rows [M, ...] hold for each token: [...] where it is the same for all, else [T, ...]."""
        if rows.shape[0] == 1:
            return rows[0]
        if not self.depths.ndim:
            return jax.lax.dynamic_index_in_dim(rows, self.depths, 0, keepdims=False)
        return rows[self.flat_depths]
