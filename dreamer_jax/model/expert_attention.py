"""EA: sparse attention over MLP experts (section 3.5, Eq. 2)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model.operations import Operations
from dreamer_jax.model.primitives import Initializer, input_init, output_init
from dreamer_jax.model.routing import Router, select, usage


class ExpertAttention(nn.Module):
    """Every token is answered by the k experts whose keys match its depth-encoded query best."""

    config: DreamerConfig
    operations: Operations

    @nn.compact
    def __call__(self, x: jax.Array, depth: jax.Array, bias: jax.Array, context, tape: Any = None):
        """[B, S, h] -> ([B, S, h], counts [E] int32); `tape` is the operation's, in the depth scan's backward pass."""
        config = self.config
        experts, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        axes = ("expert", "mlp", "hidden")
        attentions = 3 if config.depth_attention else 2
        gate_up = self._weight("gate_up", input_init(hidden, axes), (experts, 2 * size, hidden))
        down_init = output_init(hidden, config.depth, attentions, axes)
        down = self._weight("down", down_init, (experts, size, hidden))

        flat = x.reshape(-1, hidden)  # [T, h]
        logits = Router(config, experts, name="router")(flat, depth, context.total_depth)
        indices, scores = select(logits, bias, config.experts_per_token)
        weights = scores / jnp.sum(scores, axis=-1, keepdims=True)
        matrices = gate_up.astype(x.dtype), down.astype(x.dtype)
        extra = {} if tape is None else {"tape": tape}
        out = self.operations.expert_mlp(flat, indices, weights, *matrices, **extra)
        return out.reshape(x.shape), usage(indices, experts, context.real)

    def _weight(self, name: str, init: Initializer, shape: tuple[int, ...]) -> jax.Array:
        """A parameter; a given one may hold other experts than E: that is up to `operations.expert_mlp`."""
        if self.has_variable("params", name):
            return self.get_variable("params", name)
        return self.param(name, init, shape, jnp.float32)
