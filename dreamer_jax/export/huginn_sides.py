"""Huginn in PyTorch and in JAX, recurrence by recurrence, from the same initial states."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.export.form import Description, TorchSide, Trace
from dreamer_jax.export.reading import open_family
from dreamer_jax.families import build, depth_of
from dreamer_jax.runs.safetensors_files import open_tensors

COMPARED = 4
"""Recurrences that are compared, at most: all have the same weights, and more of them enlarge what is rounded."""

STEADY = 2e-6
"""Where logits move further, relative to the largest, when the states' last bits change, two right programs may differ
visibly."""


def recurrences_of(model: HuginnConfig) -> int:
    """How many are compared."""
    return min(model.depth, COMPARED)


def initial_states(model: HuginnConfig, length: int) -> np.ndarray:
    """[S, h] float32: what evaluation in JAX starts from, by position."""
    family = build(dataclasses.replace(model, dtype="float32"))
    context = _context(1, length)
    return np.asarray(family.start(jnp.zeros((1, length, model.hidden_size)), context)[0])


def _context(rows: int, length: int) -> Context:
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    return Context(jnp.ones_like(positions), positions)


class JaxSide:
    """The model of a folder, whose tensors have been compared with the checkpoint's bit by bit.

    Args:
        folder: the folder.
        description: of it.
        dtype: compute precision.
    """

    def __init__(self, folder: Path, description: Description, dtype: str):
        self.family, self.params = open_family(folder, description, dtype, REFERENCE)
        its = self.family
        self._enter, self._step, self._readout = map(jax.jit, (its.enter, its.step, its.readout))

    def trace(self, tokens: np.ndarray) -> Trace:
        """[B, S] int32 -> what prelude, every recurrence and coda put out, and the logits."""
        parts, logits = self._pass(tokens, 1.0)
        bits = np.random.default_rng(0).choice([-1, 1], (tokens.shape[1], self.family.config.hidden_size))
        _, nudged = self._pass(tokens, (1 + bits * 2.0**-23).astype(np.float32))
        moved = np.abs(nudged - logits).max(-1) / np.abs(logits).max()
        return Trace(parts, logits, moved <= STEADY)

    def _pass(self, tokens: np.ndarray, factor: Any) -> tuple[list[tuple[str, np.ndarray]], np.ndarray]:
        """(parts, logits), where every state is multiplied by a factor [S, h]."""
        family, params, depth = self.family, self.params, recurrences_of(self.family.config)
        rows, length = tokens.shape
        context, memory = _context(rows, length), family.fresh(rows, length, depth)
        inputs, memory = self._enter(params, {"tokens": jnp.asarray(tokens)}, memory, context)
        parts, weights = [("prelude", _wide(inputs))], family.weights(params)
        state = jnp.asarray(initial_states(family.config, length), inputs.dtype)
        state = jnp.broadcast_to(state * factor, inputs.shape).astype(inputs.dtype)
        for l in range(depth):
            state, memory, *_ = self._step(weights, state, inputs, depth_of(l, depth), memory, context)
            parts.append((f"recurrence {l}", _wide(state)))
            state = (state * factor).astype(inputs.dtype)
        hidden, _ = self._readout(params, state, memory, context)
        return [*parts, ("coda", _wide(hidden))], np.asarray(family.logits(params, hidden))


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def torch_model(folder: Path) -> Any:
    """The model of a folder, by this package's own copy of its code; weights stay mapped from the files."""
    import torch
    from safetensors.torch import load_file

    from dreamer_jax.export import modeling_huginn

    config = modeling_huginn.HuginnConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        model = modeling_huginn.HuginnForCausalLM(config)
    tensors = {}
    for path in sorted({stored.path for stored in open_tensors(folder).values()}):
        tensors |= load_file(path)
    own = {name: tensors[name] for name in model.state_dict()}
    model.load_state_dict(own, assign=True)
    return model.requires_grad_(False).eval()


def torch_side(folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
    """See `Form.torch_side`."""
    import torch

    model = torch_model(folder)
    run = HuginnConfig(hidden_size=model.config.n_embd, state_std=model.state_std, depth=model.config.mean_recurrence)
    depth = recurrences_of(run)
    states = torch.tensor(initial_states(run, max(tokens.shape[1], prompt + new)))[None]
    rounded = _trace(model, tokens, states, depth).logits if bfloat16 else None
    model.compute_dtype = torch.float32
    continued = fed = torch.tensor(tokens[-1:, :prompt])
    cache = None
    for _ in range(new):
        held = continued.shape[1] - fed.shape[1]
        its = states[:, held : continued.shape[1]]
        out = model(fed, num_steps=depth, input_states=its, cache=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.to_tuple()
        fed = logits[:, -1].argmax(-1, keepdim=True)
        continued = torch.cat([continued, fed], 1)
    return TorchSide(_trace(model, tokens, states, depth), rounded, continued.numpy())


def _trace(model: Any, tokens: np.ndarray, states: Any, depth: int) -> Trace:
    import torch

    own = states[:, : tokens.shape[1]].expand(len(tokens), -1, -1)
    out = model(torch.tensor(tokens), num_steps=depth, input_states=own, output_hidden_states=True, use_cache=False)
    names = ["prelude", *(f"recurrence {l}" for l in range(len(out.hidden_states) - 2)), "coda"]
    parts = [(name, x.float().numpy()) for name, x in zip(names, out.hidden_states, strict=True)]
    return Trace(parts, out.logits.numpy(), np.ones(tokens.shape, bool))
