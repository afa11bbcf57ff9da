"""Eq. 2-3: routers' logits, selection, weights, usage counts and the balancing bias."""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model.primitives import RMSNorm, depth_rope, input_init


class Router(nn.Module):
    """Attention logits of tokens over experts: depth-encoded low-rank queries, learned keys (section 3.5)."""

    config: DreamerConfig
    num_experts: int

    @nn.compact
    def __call__(self, x: jax.Array, depth: jax.Array, total_depth: jax.Array) -> jax.Array:
        """[T, h] -> [T, E] float32."""
        config = self.config
        size = config.router_size
        query_init = input_init(config.hidden_size, ("hidden", "router"))
        query_weight = self.param("query", query_init, (config.hidden_size, size), jnp.float32)
        keys_init = input_init(config.hidden_size, ("expert_keys", "router"))
        keys = self.param("keys", keys_init, (self.num_experts, size), jnp.float32)

        # Routing is float32: the product of compute-dtype factors is accumulated and kept in float32.
        query = jnp.matmul(x, query_weight.astype(x.dtype), preferred_element_type=jnp.float32)
        query = RMSNorm(name="query_norm")(query)
        query = depth_rope(query, depth, total_depth, config.depth_rope_base)
        keys = RMSNorm(name="keys_norm")(keys)
        return jnp.einsum("tr,er->te", query, keys, precision="highest") * size**-0.5


def select(logits: jax.Array, bias: jax.Array, experts_per_token: int) -> tuple[jax.Array, jax.Array]:
    """The k experts of largest logit + b, and the sigmoid of their logits: the bias steers, it never weighs (Eq. 2).

    Args:
        logits: [T, E] float32.
        bias: [E] float32.

    Returns:
        indices [T, k] int32 and scores [T, k] float32.
    """
    _, indices = jax.lax.top_k(jax.lax.stop_gradient(logits) + bias, experts_per_token)
    return indices, jax.nn.sigmoid(jnp.take_along_axis(logits, indices, axis=-1))


def usage(indices: jax.Array, num_experts: int, real: jax.Array) -> jax.Array:
    """N of Eq. 3: how often each expert was selected by tokens that are not padding.

    Args:
        indices: [T, k] int32.
        real: [T] bool, False for padding.

    Returns:
        [E] int32.
    """
    ones = jnp.broadcast_to(real[:, None], indices.shape).astype(jnp.int32)
    return jnp.zeros(num_experts, jnp.int32).at[indices].add(ones)


def update_balancing(
    balancing: Mapping[str, jax.Array], counts: Mapping[str, jax.Array], config: DreamerConfig
) -> dict[str, jax.Array]:
    """One step of Eq. 3, b += rate * sign(median(N) - N), for every router.

    Args:
        balancing: router name -> bias, [E] in DR, [L, E] in LA (one of each layer).
        counts: router name -> N of every depth, [L, E] int32, summed over the global batch and all microbatches.

    Returns:
        The new biases. In DR the counts of all depths are summed first: the depths share one router.
    """
    updated = {}
    for name, bias in balancing.items():
        n = counts[name]
        if bias.ndim < n.ndim:
            n = jnp.sum(n, axis=0)
        n = n.astype(jnp.float32)
        rate = config.expert_bias_rate if name == "expert_attention" else config.attention_bias_rate
        updated[name] = bias + rate * jnp.sign(jnp.median(n, axis=-1, keepdims=True) - n)
    return updated
