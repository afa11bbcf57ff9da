"""Which dimensions of the mixture a token takes at a depth: their state-dependent, conditional use (section 5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Reach
from dreamer_jax.blocks.parameters import Block
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.routing import Router, observe_routing, select, usage


class Taken(NamedTuple):
    """The dimensions that tokens take.

    Attributes:
        gates: dimension -> [B, P, 1] float32, what its output is multiplied by; zero where it isn't taken.
        counts: [D] int32, how often each was taken.
        seen: what was observed for analysis, or None.
    """

    gates: dict[str, jax.Array]
    counts: jax.Array
    seen: dict[str, jax.Array] | None


class Dimensions(Block):
    """A mixture of experts of higher order, whose experts are the D attentions.

    A router like those of the experts chooses n of them for each token and depth, by its state: those of largest
    logit + b. The output of one that is taken is multiplied by 2 sigmoid(logit), by which the router learns: one where
    it prefers nothing, so that with n = D and keys of zero the model is the one without a choice. The others add
    nothing. It isn't normalised, as in the attention MoEs: with n = 1 the gate would be a constant.

    What isn't taken is computed all the same: later tokens need a token's keys and values along the sequence, its
    deeper depths those along depth, and arrays have a fixed size.

    Attributes:
        names: of the dimensions.
        router: over them, n of them selected.
        observe: whether to return what analysis wants to know.
    """

    names: tuple[str, ...]
    router: Router
    observe: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, bias: Any, real: jax.Array) -> Taken:
        """The choice of tokens [B, P, h], normed; `real` [T] says which aren't padding."""
        logits = self.router(x.reshape(-1, x.shape[-1]), depth.flat())
        indices, scores = select(logits, bias, self.router.selected)  # [T, n]
        each = jax.nn.one_hot(indices, len(self.names)) * (2 * scores)[..., None]
        gates = jnp.sum(each, axis=1).reshape(*x.shape[:2], -1)
        by_name = dict(zip(self.names, jnp.split(gates, len(self.names), axis=-1), strict=True))
        seen = observe_routing(logits, scores, real) if self.observe else None
        return Taken(by_name, usage(indices, len(self.names), real), seen)

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them."""
        return {"router": self.router.fold(weights["router"], dtype)}

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Every output times its gate; the router counts itself."""
        return len(self.names) * self.router.hidden_size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """The outputs, for the gradients of their gates."""
        return len(self.names) * self.router.hidden_size
