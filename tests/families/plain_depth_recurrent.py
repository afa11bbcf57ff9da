"""The depth-recurrent transformer by its equations, one head after the other, for NumPy in float64 or jax.numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.special


def thoughts(config, params, batch, steps, xp: Any = np, erf: Any = scipy.special.erf):
    """[H_0, ..., H_T], each [B, S, h]."""
    core, h = params["core"], config.hidden_size
    seen = batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None]
    if batch.get("visible") is not None:
        seen = seen & batch["visible"]

    def layer_norm(x, its):
        centred = x - x.mean(-1, keepdims=True)
        return centred / xp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * its["scale"] + its["bias"]

    def attention(x):  # Eq. 4, 5, 7
        its = core["attention"]
        q, k, v = xp.split(x @ its["qkv"] + its["qkv_bias"], 3, axis=-1)
        size, found = h // config.heads, []
        for head in range(config.heads):
            own = slice(head * size, (head + 1) * size)
            queries, keys, values = q[..., own], k[..., own], v[..., own]
            if config.positions == "rope":
                queries, keys = rotated(queries), rotated(keys)
            scores = xp.where(seen, queries @ keys.swapaxes(-1, -2) / size**0.5, -1e30)
            weights = xp.exp(scores - scores.max(-1, keepdims=True))
            found.append(weights / weights.sum(-1, keepdims=True) @ values)
        return xp.concatenate(found, axis=-1) @ its["out"] + its["out_bias"]

    def rotated(x):
        half = x.shape[-1] // 2
        angle = batch["positions"][..., None] * 10_000.0 ** (-xp.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = xp.cos(angle), xp.sin(angle)
        return xp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    def feed_forward(x):  # Eq. 9
        its = core["feed_forward"]
        inner = x @ its["in_matrix"] + its["in_bias"]
        active = inner * (1 + erf(inner / 2**0.5)) / 2 if config.activation == "gelu" else xp.maximum(inner, 0)
        return active @ its["out_matrix"] + its["out_bias"]

    def sublayer(name, x, branch):  # Eq. 6, 8
        norm = core[f"{name}_norm"]
        factor = core[f"{name}_scale"]["factor"] if config.layer_scale else 1.0
        if config.norm == "pre":
            return x + factor * branch(layer_norm(x, norm))
        return layer_norm(x + factor * branch(x), norm)

    states = [params["embedding"][batch["tokens"]]]
    for t in range(steps):
        before = states[-1]
        x = before + params["depth_embedding"][t] if config.depth_embedding_std else before  # Eq. 10
        x = sublayer("mlp", sublayer("attention", x, attention), feed_forward)
        if config.gate:  # Eq. 2, 3
            z = xp.concatenate([x, before], axis=-1) @ core["gate"]["matrix"] + core["gate"]["bias"]
            z = 1 / (1 + xp.exp(-z))
            x = z * x + (1 - z) * before
        states.append(x)
    return states


def answers(config, params, batch, state, xp: Any = np):
    """Logits of the classes [B, C] from a state (section 3.3)."""
    rows = xp.arange(len(state))
    z = xp.concatenate([state[rows, batch["read"][:, r]] for r in range(batch["read"].shape[1])], axis=-1)
    its = params["classifier"]
    if config.readout == "pair":
        z = xp.maximum(z @ its["hidden"] + its["hidden_bias"], 0)
    return z @ its["out"] + its["out_bias"]


def mean_loss(config, params, batch, steps, xp: Any = np, erf: Any = scipy.special.erf):
    """Cross-entropy over the rows that count, after the last step, or its mean over steps 1 to T."""
    states, rows = thoughts(config, params, batch, steps, xp, erf)[1:], xp.arange(len(batch["tokens"]))
    first, losses = batch["read"][:, 0], []
    label, counted = batch["targets"][rows, first], batch["loss_mask"][rows, first]
    for state in states if config.loss_at == "every" else states[-1:]:
        logits = answers(config, params, batch, state, xp)
        losses.append(((xp.log(xp.exp(logits).sum(-1)) - logits[rows, label]) * counted).sum() / counted.sum())
    return sum(losses) / len(losses)
