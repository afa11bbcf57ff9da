"""The depth-recurrent transformer in PyTorch and in JAX, step by step, on the same random puzzles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.readout import READ
from dreamer_jax.export.form import Description, TorchSide, Trace
from dreamer_jax.export.reading import open_family
from dreamer_jax.families import forward


def puzzles_of(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """A batch around tokens [B, S]: positions to read and, for models without positions, graphs; padding at the end of
    the first row."""
    rows, length = tokens.shape
    rng = np.random.default_rng(1)
    batch = {
        "tokens": tokens,
        "read": rng.integers(0, length, (rows, READ[model.readout])).astype(np.int32),
        "segment_ids": np.ones((rows, length), np.int32),
    }
    batch["segment_ids"][0, length - length // 4 :] = 0
    if model.positions == "none":
        batch["visible"] = (rng.random((rows, length, length)) < 0.2) | np.eye(length, dtype=bool)
    return batch


class JaxSide:
    """The model of a folder, whose tensors have been compared with the checkpoint's bit by bit.

    Args:
        folder: the folder.
        description: of it.
        dtype: compute precision.
    """

    def __init__(self, folder: Path, description: Description, dtype: str):
        self.family, self.params = open_family(folder, description, dtype)

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> states and logits after every step."""
        batch = {name: jnp.asarray(values) for name, values in puzzles_of(self.family.config, tokens).items()}
        family = self.family

        def observe(step):
            def observed(weights, state, inputs, depth, memory, context, tape=None):
                stepped = step(weights, state, inputs, depth, memory, context, tape)
                logits = family.class_logits(self.params, stepped.state, memory, context)
                return stepped._replace(counts=(stepped.state, logits))

            return observed

        run = jax.jit(lambda params, batch: forward(family, params, {}, batch, observe=observe).counts)
        return trace_of(*map(np.asarray, run(self.params, batch)))


def trace_of(states: np.ndarray, logits: np.ndarray) -> Trace:
    """From states [T, B, S, h] and logits [T, B, C]: a row has one position for each step, and they are [B, T, C]."""
    parts = [(f"step {t}", state.reshape(len(state), 1, -1)) for t, state in enumerate(states, 1)]
    return Trace(parts, logits.swapaxes(0, 1), np.ones(logits.shape[1::-1], bool))


def torch_side(folder: Path, tokens: np.ndarray, bfloat16: bool) -> TorchSide:
    """See `Form.torch_side`; there is nothing to continue."""
    import torch

    from dreamer_jax.export.modeling_depth_recurrent import DepthRecurrent

    model = DepthRecurrent.load(str(folder))
    settings: Any = type("Settings", (), model.settings)
    batch = {name: torch.tensor(values) for name, values in puzzles_of(settings, tokens).items()}

    def trace() -> Trace:
        with torch.no_grad():
            logits, states = model.think(**batch)
        return trace_of(torch.stack(states).numpy(), logits.numpy())

    rounded = trace().logits if bfloat16 else None
    model.float()
    return TorchSide(trace(), rounded, tokens[-1:])
