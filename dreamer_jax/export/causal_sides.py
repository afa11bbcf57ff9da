"""Causal language models in PyTorch and in JAX, depth by depth."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.export.causal_form import TransformersForm
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
        self.family, self.params = open_family(folder, description, dtype)
        self._run = jax.jit(self._pass)

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> states after every depth, and the logits."""
        states, logits = map(np.asarray, self._run(self.params, jnp.asarray(tokens)))
        parts = [(f"depth {l}", np.asarray(x, np.float32)) for l, x in enumerate(states)]
        return Trace(parts, logits, np.ones(tokens.shape, bool))

    def _pass(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """States after every depth [L, B, S, h], logits."""
        family = self.family

        def observe(step):
            def observed(*arguments):
                stepped = step(*arguments)
                return stepped._replace(counts=family.stream(stepped.state))

            return observed

        passed = forward(family, params, {}, {"tokens": tokens}, observe=observe)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return passed.counts, family.logits(params, hidden)


def torch_model(form: TransformersForm, folder: Path) -> Any:
    """The model of a folder, by this package's own copy of its code; weights stay mapped from the files."""
    import torch
    from safetensors.torch import load_file

    code = importlib.import_module(f"dreamer_jax.export.{form.model_file.removesuffix('.py')}")
    config = getattr(code, f"{form.classes}Config")(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        model = getattr(code, f"{form.classes}ForCausalLM")(config)
    tensors = {}
    for path in sorted({stored.path for stored in open_tensors(folder).values()}):
        tensors |= load_file(path)
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False).eval()


def torch_trace(model: Any, tokens: np.ndarray) -> Trace:
    """The states after every depth, and the logits."""
    import torch

    out = model(torch.tensor(tokens), output_hidden_states=True, use_cache=False)
    parts = [(f"depth {l}", x.float().numpy()) for l, x in enumerate(out.hidden_states[:-1])]
    return Trace(parts, out.logits.numpy(), np.ones(tokens.shape, bool))


def torch_side(
    model: Any,
    tokens: np.ndarray,
    prompt: int,
    new: int,
    bfloat16: bool,
    trace: Callable[[Any, np.ndarray], Trace] = torch_trace,
    **options: Any,
) -> TorchSide:
    """See `Form.torch_side`.

    Args:
        model: of the folder.
        tokens, prompt, new, bfloat16: see there.
        trace: (model, tokens) -> one forward pass.
        options: of the model in greedy decoding.
    """
    import torch

    rounded = trace(model, tokens).logits if bfloat16 else None
    model.compute_dtype = torch.float32
    continued = fed = torch.tensor(tokens[-1:, :prompt])
    cache = None
    for _ in range(new):
        logits, cache = model(fed, cache=cache, use_cache=True, logits_to_keep=1, **options).to_tuple()
        fed = logits[:, -1].argmax(-1, keepdim=True)
        continued = torch.cat([continued, fed], 1)
    return TorchSide(trace(model, tokens), rounded, continued.numpy())
