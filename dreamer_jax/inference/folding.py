"""A trained model as inference wants it: shared experts folded (Eq. 8), weights cast once, LA and DR in one layout.

Everything that differs between depths has a leading axis M: the layers of LA, a single entry in DR. LA's experts of
all layers lie in one row of L * E, so that tokens at different depths can be computed together in every variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.inference.experts import arrange
from dreamer_jax.model.primitives import rms_norm

Tree = Any


class Routing(NamedTuple):
    """A router (Eq. 2).

    Attributes:
        query: [M, h, r], compute dtype.
        query_scale: [M, r] float32.
        keys: [M, E, r] float32, normalised and scaled already.
        bias: [M, E] float32, the balancing bias.
    """

    query: jax.Array
    query_scale: jax.Array
    keys: jax.Array
    bias: jax.Array


class AttentionWeights(NamedTuple):
    """One attention, its pre-norm included. G experts in its projections: DR's routed ones, LA's layers.

    Attributes:
        norm: [M, h] float32.
        qkv: [G, h, (n + 2 kv) d], compute dtype, folded, arranged (see `experts.arrange`).
        out: [G, n d, h], likewise.
        q_scale, k_scale: [M, d] float32.
        routing: of the attention MoE; None in LA, where the depth is the expert.
    """

    norm: jax.Array
    qkv: jax.Array
    out: jax.Array
    q_scale: jax.Array
    k_scale: jax.Array
    routing: Routing | None


class ExpertWeights(NamedTuple):
    """Expert attention, its pre-norm included.

    Attributes:
        norm: [M, h] float32.
        gate_up: [M * E, 2F, h], compute dtype.
        down: [M * E, F, h], compute dtype, arranged (see `experts.arrange`).
        routing: over the E experts of a depth.
    """

    norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    routing: Routing


class Weights(NamedTuple):
    """All weights of a folded model.

    Attributes:
        embedding, head: [V, h], compute dtype.
        sequence: SA.
        depth: DA, or None.
        experts: EA.
        last_norm: [h] float32: DR's norm of the residual stream, which follows every depth; LA's final norm.
    """

    embedding: jax.Array
    head: jax.Array
    sequence: AttentionWeights
    depth: AttentionWeights | None
    experts: ExpertWeights
    last_norm: jax.Array


def fold_weights(config: DreamerConfig, params: Tree, balancing: Mapping[str, Any]) -> Weights:
    """Parameters and balancing biases of training as `Weights` in `config.dtype`; may be jitted.

    The shared linear expert is added to every routed one in float32 (Eq. 8) and disappears.

    Args:
        config: sizes, variant and compute precision.
        params, balancing: as `Dreamer.apply` takes them.
    """
    layer = params["layer"] if config.recurrent else params["layers"]
    if config.recurrent:
        layer, balancing = jax.tree.map(lambda leaf: leaf[None], (layer, balancing))

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(config.dtype)

    def routing(router: Tree, name: str) -> Routing:
        keys = rms_norm(router["keys"], router["keys_norm"]["scale"][:, None])
        return Routing(cast(router["query"]), router["query_norm"]["scale"], keys, balancing[name])

    def attention(norm: str, name: str) -> AttentionWeights:
        its = layer[name]
        projections = its["projections"]
        qkv, out = projections["qkv"], projections["out"]
        if config.recurrent:
            qkv = qkv[0] + projections["qkv_shared"]
            out = out[0] + projections["out_shared"]
        return AttentionWeights(
            norm=layer[norm]["scale"],
            qkv=arrange(cast(qkv), config.implementation),
            out=arrange(cast(out), config.implementation),
            q_scale=its["q_norm"]["scale"],
            k_scale=its["k_norm"]["scale"],
            routing=routing(projections["router"], name) if config.recurrent else None,
        )

    experts = layer["expert_attention"]
    return Weights(
        embedding=cast(params["embedding"]),
        head=cast(params["head"]),
        sequence=attention("sequence_norm", "sequence_attention"),
        depth=attention("depth_norm", "depth_attention") if config.depth_attention else None,
        experts=ExpertWeights(
            norm=layer["expert_norm"]["scale"],
            gate_up=_merge(cast(experts["gate_up"])),
            down=arrange(_merge(cast(experts["down"])), config.implementation),
            routing=routing(experts["router"], "expert_attention"),
        ),
        last_norm=layer["residual_norm"]["scale"][0] if config.recurrent else params["final_norm"]["scale"],
    )


def _merge(experts: jax.Array) -> jax.Array:
    """[M, E, ...] -> [M * E, ...]."""
    return jnp.reshape(experts, (-1, *experts.shape[2:]))
