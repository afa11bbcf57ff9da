"""The Universal Transformer in PyTorch and in JAX, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.export.form import Description, Trace
from dreamer_jax.export.reading import open_family
from dreamer_jax.families import forward

TIE = 1e-5
"""Where added halting probabilities come nearer to the threshold, two right programs may take different steps."""


class JaxSide:
    """The model of a folder, whose tensors have been compared with the checkpoint's bit by bit.

    Args:
        folder: the folder.
        description: of it.
        dtype: compute precision.
    """

    def __init__(self, folder: Path, description: Description, dtype: str):
        self.family, self.params = open_family(folder, description, dtype)
        self._run = jax.jit(self._pass)

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> states after every step, and the logits."""
        states, tied, logits = map(np.asarray, self._run(self.params, jnp.asarray(tokens)))
        clean = ~np.logical_or.accumulate(tied.any(0), axis=1)
        return Trace([(f"step {t}", np.asarray(x, np.float32)) for t, x in enumerate(states, 1)], logits, clean)

    def _pass(self, params: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        """States after every step, whether rounding may have decided at it who halts [T, B, S], logits."""
        family = self.family

        def observe(step):
            def observed(weights, state, inputs, depth, memory, context, tape=None):
                stepped = step(weights, state, inputs, depth, memory, context, tape)
                tied = jnp.zeros(tokens.shape, bool)
                if family.halts:
                    signalled = family.signals(state.x, context.positions, depth)
                    p = family.unit.apply({"params": weights.shared["halting"]}, signalled)
                    beyond = state.pondered.total + p - (1 - family.config.halting_epsilon)
                    tied = state.pondered.running & (jnp.abs(beyond) < TIE)
                return stepped._replace(counts=(stepped.state.x, tied))

            return observed

        passed = forward(family, params, {}, {"tokens": tokens}, observe=observe)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return *passed.counts, family.logits(params, hidden)


def torch_trace(model: Any, tokens: np.ndarray) -> Trace:
    """One forward pass."""
    import torch

    out = model(torch.tensor(tokens), output_hidden_states=True, use_cache=False)
    states = list(out.hidden_states[:-1])
    states += states[-1:] * (model.config.depth - len(states))  # all have halted: what follows is copied
    parts = [(f"step {t}", x.float().numpy()) for t, x in enumerate(states, 1)]
    return Trace(parts, out.logits.numpy(), np.ones(tokens.shape, bool))
