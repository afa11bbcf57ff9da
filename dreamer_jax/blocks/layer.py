"""A transformer layer of causal attention and a feed-forward, its norms in four arrangements, and a stack of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.feed_forward import MLP, FeedForward
from dreamer_jax.blocks.memory import Context, Fresh
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.residual import Residual
from dreamer_jax.blocks.self_attention import SelfAttention

Form = Literal["sandwich", "pre_norm", "branch_norm", "double_norm"]


class Layer(nn.Module):
    """One transformer layer, x [B, P, h] -> [B, P, h].

    Attributes:
        attention, feed_forward: f of the two halves.
        form: where norms N stand: "sandwich" N'(x + f(N(x))), which norms the residual stream itself; "pre_norm"
            x + f(N(x)); "branch_norm" x + N'(f(x)); "double_norm" x + N'(f(N(x))).
        epsilon: of the norms.
        norm: makes one.
    """

    attention: SelfAttention
    feed_forward: FeedForward | MLP
    form: Form
    epsilon: float
    norm: Callable[..., Any] = RMSNorm

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """The layer and its memory of the sequence, with this position's keys and values."""

        def norm(name: str, x: jax.Array) -> jax.Array:
            return self.norm(epsilon=self.epsilon, name=name)(x)

        def before(name: str, x: jax.Array) -> jax.Array:
            return x if self.form == "branch_norm" else norm(f"{name}_norm", x)

        def joined(name: str, x: jax.Array, branch: jax.Array) -> jax.Array:
            if self.form == "sandwich":
                return norm(f"{name}_out_norm", x + branch)
            return x + (branch if self.form == "pre_norm" else norm(f"{name}_out_norm", branch))

        attended, memory = self.attention(before("attention", x), depth, memory, context)
        x = joined("attention", x, attended)
        return joined("mlp", x, self.feed_forward(before("mlp", x))), memory

    @property
    def norms(self) -> int:
        """Norms over h."""
        return 4 if self.form in ("sandwich", "double_norm") else 2


def init_layers(layer: Layer, key: jax.Array, count: int) -> dict[str, Any]:
    """Parameters of so many layers, in boxes, by number."""
    token, x = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, layer.attention.hidden_size))
    depth, context = Depth(jnp.int32(0), jnp.int32(1)), Context(token, token)
    keys = jax.random.split(key, count)
    return {str(i): layer.init(each, x, depth, Fresh(), context)["params"] for i, each in enumerate(keys)}


def apply_layers(
    layer: Layer, weights: dict[str, Any], x: jax.Array, depth: Depth, memory: Any, context: Context
) -> tuple[jax.Array, Any]:
    """A stack of C layers at recurrence l; layer j gets the number l C + j, under which its keys are kept."""
    for j in range(len(weights)):
        number = Depth(depth.index * len(weights) + j, depth.total)
        x, memory = layer.apply({"params": weights[str(j)]}, x, number, memory, context)  # type: ignore[misc]
    return x, memory


def layer_shares(
    layer: Layer,
    part: str,
    count: int,
    depths: int,
    outside: bool = False,
    truncated: int | None = None,
    cached: int | None = None,
) -> list[Share]:
    """What a stack of `count` layers counts, applied `depths` times.

    Args:
        layer: any of them.
        part, outside: see `Share`.
        truncated, cached: of the `depths`, how many are differentiated and how many keep keys; None for all.
    """
    attention = layer.attention
    hidden, rotated = attention.hidden_size, (attention.heads + attention.kv_heads) * attention.head_size
    residual = Residual(hidden, 2, layer.norms, rotated)
    norm = layer.norm(hidden, parent=None)
    return [
        Share(
            part,
            block,
            0 if block is residual else count * n,
            count * n * depths,
            experts=isinstance(block, FeedForward),
            outside=outside,
            truncated=None if truncated is None else count * n * truncated,
            cached=None if cached is None else count * cached,
        )
        for block, n in ((attention, 1), (layer.feed_forward, 1), (norm, layer.norms), (residual, 1))
    ]
