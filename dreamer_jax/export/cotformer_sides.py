"""CoTFormer in PyTorch and in JAX, repeat by repeat. Both decide by the threshold, as generation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.export.form import Description, Trace
from dreamer_jax.export.reading import open_family
from dreamer_jax.families import forward

TIE = {"float32": 1e-5, "bfloat16": 0.02}
"""Where a gate comes nearer to the threshold, two right programs may take different repeats."""


class JaxSide:
    """The model of a folder, whose tensors have been compared with the checkpoint's bit by bit.

    Args:
        folder: the folder.
        description: of it.
        dtype: compute precision.
    """

    def __init__(self, folder: Path, description: Description, dtype: str):
        causal: dict[str, Any] = {"decide": "threshold"} if description.model.adaptive else {}
        self.family, self.params = open_family(folder, description, dtype, **causal)
        self._run = jax.jit(self._pass)

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> states after every repeat, and the logits."""
        states, tied, logits = map(np.asarray, self._run(self.params, jnp.asarray(tokens)))
        clean = ~np.logical_or.accumulate(tied.any(0), axis=1)
        return Trace([(f"repeat {r}", np.asarray(x, np.float32)) for r, x in enumerate(states, 1)], logits, clean)

    def _pass(self, params: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        """States after every repeat, whether rounding may have decided after it who goes on [R, B, S], logits."""
        family, config = self.family, self.family.config

        def observe(step):
            def observed(weights, state, inputs, depth, memory, context, tape=None):
                stepped = step(weights, state, inputs, depth, memory, context, tape)
                tied = jnp.zeros(tokens.shape, bool)
                if config.adaptive:
                    near = jnp.abs(stepped.state.gate - config.threshold) < TIE[config.dtype]
                    tied = state.active & near & (depth.index + 1 < depth.total)
                return stepped._replace(counts=(stepped.state.x, tied))

            return observed

        passed = forward(family, params, {}, {"tokens": tokens}, observe=observe)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return *passed.counts, family.logits(params, hidden)


def torch_trace(model: Any, tokens: np.ndarray) -> Trace:
    """One forward pass."""
    import torch

    out = model(torch.tensor(tokens), decide="threshold", output_hidden_states=True, use_cache=False)
    states = list(out.hidden_states[:-1])
    parts = [(f"repeat {r}", x.float().numpy()) for r, x in enumerate(states, 1)]
    return Trace(parts, out.logits.numpy(), np.ones(tokens.shape, bool))
