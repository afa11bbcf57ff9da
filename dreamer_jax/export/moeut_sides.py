"""MoEUT in JAX, repeat by repeat, for the comparison with PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.sigma_moe import Selection
from dreamer_jax.export import causal_sides
from dreamer_jax.export.form import Trace
from dreamer_jax.families import forward
from dreamer_jax.recurrence import Stepped

TIE = 1e-5
"""Where the logits of the last expert that is selected and of the first that isn't are nearer, two right programs may
select differently."""


class JaxSide(causal_sides.JaxSide):
    """As of any causal language model, without the positions at which rounding may decide who answers."""

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> states after every repeat, and the logits."""
        states, tied, logits = map(np.asarray, self._run(self.params, jnp.asarray(tokens)))
        clean = ~np.logical_or.accumulate(tied.any(0), axis=1)
        return Trace([(f"depth {l}", np.asarray(x, np.float32)) for l, x in enumerate(states)], logits, clean)

    def _pass(self, params: Any, tokens: jax.Array) -> Any:
        """States after every repeat, whether routers tied at it [R, B, S], logits."""

        def repeat(weights, x, inputs, depth, memory, context, tape=None):
            """The family's step, which says nothing of logits, layer by layer."""
            tied = jnp.zeros(tokens.size, bool)
            for g in range(len(weights.shared)):
                its: Any = self.family.layer.apply(
                    {"params": weights.shared[str(g)]}, x, depth, memory.sequence, context
                )
                x, _, routers = its
                for router in routers.values():
                    tied |= ties(router)
            return Stepped(x, memory, (), (x, tied.reshape(tokens.shape)))

        passed = forward(self.family, params, {}, {"tokens": tokens}, observe=lambda step: repeat)
        hidden, _ = self.family.readout(params, passed.state, passed.memory, passed.context)
        return *passed.counts, self.family.logits(params, hidden)


def ties(router: Selection) -> jax.Array:
    """[T] bool: whether rounding may have decided what a token, or one of its heads, selected."""
    selected, experts = router.indices.shape[-1], router.logits.shape[-1]
    if selected == experts:
        return jnp.zeros(len(router.logits), bool)
    best = jax.lax.top_k(router.logits, selected + 1)[0]
    return jnp.any((best[..., -2] - best[..., -1] < TIE).reshape(len(best), -1), axis=1)
