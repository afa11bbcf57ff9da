"""Ouro in PyTorch and in JAX, loop by loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.export import causal_sides
from dreamer_jax.export.form import Description, TorchSide, Trace
from dreamer_jax.export.reading import open_family
from dreamer_jax.families import forward
from dreamer_jax.runs.safetensors_files import open_tensors


class JaxSide:
    """The model of a folder, whose tensors have been compared with the checkpoint's bit by bit.

    Args:
        folder: the folder.
        description: of it.
        dtype: compute precision.
    """

    def __init__(self, folder: Path, description: Description, dtype: str):
        family, self.params = open_family(folder, description, dtype, REFERENCE)

        @jax.jit
        def run(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            states, _ = forward(family, params, {}, {"tokens": tokens}).outputs
            return states, family.logits(params, states[-1])

        self._run = run

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> the states after every loop, and the last one's logits."""
        states, logits = self._run(self.params, jnp.asarray(tokens))
        parts = [(f"loop {t}", np.asarray(x, np.float32)) for t, x in enumerate(states, 1)]
        return Trace(parts, np.asarray(logits), np.ones(tokens.shape, bool))


def torch_model(folder: Path) -> Any:
    """The model of a folder, by this package's own copy of its code; weights stay mapped from the files."""
    import torch
    from safetensors.torch import load_file

    from dreamer_jax.export import modeling_ouro

    config = modeling_ouro.OuroConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        model = modeling_ouro.OuroForCausalLM(config)
    tensors = {}
    for path in sorted({stored.path for stored in open_tensors(folder).values()}):
        tensors |= load_file(path)
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False).eval()


def torch_side(folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
    """See `Form.torch_side`; every token takes all loops."""
    its = tokens, prompt, new, bfloat16
    return causal_sides.torch_side(torch_model(folder), *its, _trace, exit_threshold=1.0)


def _trace(model: Any, tokens: np.ndarray) -> Trace:
    import torch

    out = model(torch.tensor(tokens), exit_threshold=1.0, output_hidden_states=True, use_cache=False)
    parts = [(f"loop {t}", x.float().numpy()) for t, x in enumerate(out.hidden_states[1:], 1)]
    return Trace(parts, out.logits.numpy(), np.ones(tokens.shape, bool))
