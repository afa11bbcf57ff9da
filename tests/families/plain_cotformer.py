"""CoTFormer by its equations, one document at a time: positions that don't go on are taken out of the sequence.

`numpy` and float64 for comparing what is computed, `jax.numpy` for gradients by plain autodiff."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Repeated(NamedTuple):
    """What came of a document of S tokens: logits [S, V]; the states of all positions after each repeat [R, S, h]; the
    positions that took each repeat; the gates that were read after it, of those positions."""

    logits: Any
    states: list[Any]
    took: list[np.ndarray]
    gates: list[Any]


def layer_norm(x, scale, xp):
    centred = x - x.mean(-1, keepdims=True)
    return centred / xp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def rotated(x, positions, xp):
    """[S, n, d] -> [S, n, d]; element i turns with element i + d/2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 10_000 ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gelu(x, xp):
    if xp is np:
        return x / 2 * (1 + np.vectorize(math.erf, [float])(x / 2**0.5))
    import jax

    return x / 2 * (1 + jax.lax.erf(x / 2**0.5))


def layer(config, weights, x, positions, earlier, xp):
    """[P, h] at these positions; what they see is appended to `earlier`, (positions, k, v) of each repeat."""
    normed = layer_norm(x, weights["attention_norm"]["scale"], xp)
    heads = [part.reshape(len(x), config.heads, -1) for part in xp.split(normed @ weights["attention"]["qkv"], 3, -1)]
    q, k = (rotated(part, positions, xp) for part in heads[:2])
    earlier.append((positions, k, heads[2]))
    places = np.concatenate([at for at, _, _ in earlier])
    keys, values = (xp.concatenate([its[i] for its in earlier]) for i in (1, 2))
    scores = xp.einsum("qnd,knd->nqk", q, keys) / q.shape[-1] ** 0.5
    scores = scores + np.where(places <= positions[:, None], 0, -1e30)
    shares = xp.exp(scores - scores.max(-1, keepdims=True))
    seen = xp.einsum("nqk,knd->qnd", shares / shares.sum(-1, keepdims=True), values)
    x = x + seen.reshape(x.shape) @ weights["attention"]["out"]
    mlp = weights["feed_forward"]
    inner = gelu(layer_norm(x, weights["mlp_norm"]["scale"], xp) @ mlp["in_matrix"], xp)
    return x + inner @ mlp["out_matrix"]


def stack(config, layers, x, positions, earlier, xp):
    for number in sorted(layers):
        x = layer(config, layers[number], x, positions, earlier[number], xp)
    return x


def passed(
    config: Any,
    params: Any,
    tokens: np.ndarray,
    chosen: Callable[[int, np.ndarray], np.ndarray] | None = None,
    xp: Any = np,
    depth: int | None = None,
) -> Repeated:
    """A document [S].

    Args:
        config, params: of the model.
        tokens: [S].
        chosen: (repeat from 0, its positions' gates) -> which of them go on, numbers or bool; None for all.
        xp: numpy, or jax.numpy.
        depth: R, by default the model's.
    """
    depth, everyone = depth or config.depth, np.arange(len(tokens))

    def nothing(layers):
        return {number: [] for number in layers}

    x = stack(config, params["begin"], params["embedding"][tokens], everyone, nothing(params["begin"]), xp)
    earlier, active, gate = nothing(params["middle"]), everyone, None
    states, took, gates = [], [], []
    for r in range(depth):
        before = x[active]
        added = 0
        if config.depth_embedding == "linear":
            added = (depth - 1 - r) * params["depth_embedding"]
        elif config.depth_embedding == "learned":
            added = params["depth_embedding"][r]
        after = stack(config, params["middle"], before + added, active, earlier, xp)
        if config.repeat_norm:
            after = layer_norm(after, params["repeat_norm"], xp)
        if gate is not None:
            after = (1 - gate[:, None]) * before + gate[:, None] * after
        if xp is np:
            x = x.copy()
            x[active] = after
        else:
            x = x.at[active].set(after)
        states.append(x)
        took.append(active)
        if config.adaptive:
            gate = 1 / (1 + xp.exp(-after @ params["routers"]["row"][r]))
            gates.append(gate)
            on = np.arange(len(active)) if chosen is None else chosen(r, gate)
            active, gate = active[on], gate[on]
    x = stack(config, params["end"], x, everyone, nothing(params["end"]), xp)
    return Repeated(layer_norm(x, params["final_norm"], xp) @ params["embedding"].T, states, took, gates)


def by_threshold(threshold: float) -> Callable[[int, np.ndarray], np.ndarray]:
    """Those whose gate reaches it."""
    return lambda r, gates: np.flatnonzero(gates >= threshold)


def by_capacity(*factors: float) -> Callable[[int, np.ndarray], np.ndarray]:
    """int(f_r / f_{r-1} * present number) with the largest gates, in the order of the text."""
    f = (1.0, *factors, 0.0)

    def chosen(r: int, gates: np.ndarray) -> np.ndarray:
        number = int(f[r + 1] / f[r] * len(gates)) if f[r] else 0
        return np.sort(np.argsort(-gates, kind="stable")[:number])

    return chosen


def loss(logits, targets, mask, xp):
    """Sum of the cross-entropy over the targets that count."""
    top = logits.max(-1, keepdims=True)
    log_softmax = logits - top - xp.log(xp.exp(logits - top).sum(-1, keepdims=True))
    return -(xp.take_along_axis(log_softmax, targets[..., None], -1)[..., 0] * mask).sum()
