"""The Universal Transformer by its equations: all steps first, then who halts when, then the weights of the steps.

`numpy` and float64 for comparing what is computed, `jax.numpy` for gradients by plain autodiff."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Halted(NamedTuple):
    """What came of a pass: logits [B, S, V], steps N and remainder R [B, S], weights and states of the steps."""

    logits: Any
    updates: Any
    remainder: Any
    weights: Any
    states: Any


def sinusoid(number: int, size: int) -> np.ndarray:
    """[size]; one element after the other."""
    angles = [number / 10_000 ** (2 * (i // 2) / size) for i in range(size)]
    return np.array([np.cos(a) if i % 2 else np.sin(a) for i, a in enumerate(angles)])


def layer_norm(weights, x, xp):
    centred = x - x.mean(-1, keepdims=True)
    return centred / xp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights["scale"] + weights["bias"]


def layer(config, weights, x, xp):
    """Dehghani et al. (2018), Eq. 4 and 5; one head after the other."""
    h, size, length = config.hidden_size, config.hidden_size // config.heads, x.shape[1]
    q, k, v = (x @ weights["attention"]["qkv"][:, i * h : i * h + h] for i in range(3))
    future = np.triu(np.full((length, length), -1e30), 1)
    heads = []
    for n in range(config.heads):
        own = slice(n * size, n * size + size)
        scores = q[..., own] @ k[..., own].swapaxes(1, 2) / size**0.5 + future
        shares = xp.exp(scores - scores.max(-1, keepdims=True))
        heads.append(shares / shares.sum(-1, keepdims=True) @ v[..., own])
    x = layer_norm(weights["attention_norm"], x + xp.concatenate(heads, -1) @ weights["attention"]["out"], xp)
    mlp = weights["feed_forward"]
    inner = xp.maximum(x @ mlp["in_matrix"] + mlp["in_bias"], 0)
    return layer_norm(weights["mlp_norm"], x + inner @ mlp["out_matrix"] + mlp["out_bias"], xp)


def passed(config, params, tokens, xp=np, steps=None) -> Halted:
    """A pass over rows [B, S] without padding, of at most so many steps."""
    steps = steps or config.depth
    h, shape = config.hidden_size, tokens.shape
    x = params["embedding"][tokens] * h**0.5
    places = np.stack([sinusoid(i + 1, h) for i in range(shape[1])])
    states, p, running, added = [], [], np.ones(shape, bool), np.zeros(shape)
    for t in range(1, steps + 1):
        signalled = x + places + sinusoid(t, h)
        new = layer(config, params["layer"], signalled, xp)
        states.append(new)
        if config.halting != "none":
            unit = params["halting"]
            p.append(1 / (1 + xp.exp(-(signalled @ unit["row"] + unit["bias"][0]))))
            x = xp.where(running[..., None], new, x) if config.copy_halted else new
            added = added + p[-1]
            running = running & (added <= 1 - config.halting_epsilon)
        else:
            x = new
    states = xp.stack(states)
    if config.halting == "none":
        nothing = np.zeros(shape)
        return Halted(states[-1] @ params["embedding"].T, nothing + steps, nothing, None, states)
    p = xp.stack(p)
    enough = xp.cumsum(p, 0) > 1 - config.halting_epsilon  # [T, B, S]
    halted = enough.any(0)
    last = xp.where(halted, enough.argmax(0), steps - 1)  # N - 1
    number = np.arange(steps)[:, None, None]
    before = xp.where(number < last, p, 0)
    remainder = 1 - before.sum(0)
    if config.halting == "interpolate":  # no remainder at the forced stop
        remainder = xp.where(halted, remainder, 0)
        at_last = xp.where(halted, remainder, p[-1])
    else:
        at_last = remainder
    weights = before + xp.where(number == last, at_last, 0)
    if config.halting == "interpolate":  # y = sum of w_t x_t, times (1 - w) of all later steps
        later = [xp.prod(1 - weights[t + 1 :], axis=0) for t in range(steps)]
        weights = weights * xp.stack(later)
    y = (weights[..., None] * states).sum(0)
    return Halted(y @ params["embedding"].T, last + 1, remainder, weights, states)


def loss(config, params, tokens, targets, mask, xp):
    """Sum over the targets that count: cross-entropy, and ponder_weight (N + R)."""
    found = passed(config, params, tokens, xp)
    top = found.logits.max(-1, keepdims=True)
    log_softmax = found.logits - top - xp.log(xp.exp(found.logits - top).sum(-1, keepdims=True))
    entropy = -xp.take_along_axis(log_softmax, targets[..., None], -1)[..., 0]
    cost = 0 if config.halting == "none" else config.ponder_weight * (found.updates + found.remainder)
    return ((entropy + cost) * mask).sum()
