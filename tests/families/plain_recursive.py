"""Recursive transformers by their equations: NumPy in float64, one position, one head, one layer after the other."""

from __future__ import annotations

from typing import Any

import numpy as np


def wide(params: Any) -> Any:
    """Parameters in float64."""
    if isinstance(params, dict):
        return {name: wide(value) for name, value in params.items()}
    return np.asarray(params, np.float64)


def softmax(x: Any) -> Any:
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


class PlainRecursive:
    """A row of tokens; keys and values of earlier positions in dictionaries.

    Args:
        config: the section `model`.
        params: in float64.
    """

    def __init__(self, config: Any, params: Any):
        self.config, self.params = config, params
        self.kept: dict[Any, dict[int, Any]] = {}  # application -> position -> keys and values

    def order(self) -> list[tuple[int, int]]:
        """(layer k, application b) of l = 0 .. K B - 1."""
        layers, times = self.config.layers, self.config.depth
        if "sequence" in self.config.sharing:
            return [(l // times, l % times) for l in range(layers * times)]
        return [(l % layers, l // layers) for l in range(layers * times)]

    def weights(self, k: int, b: int) -> Any:
        """The matrices W + A B, and the norms, of an application."""
        own = self.params.get("relaxation", {})
        if "sequence" in self.config.sharing:
            shared, own = at(self.params["layers"], k), at(own, (k, b))
        else:
            shared, own = self.params["layers"][str(k)], at(own.get(str(k), {}), b)
        its = {name: {**shared.get(name, {}), **own.get(name, {})} for name in {*shared, *own}}
        if not self.config.rank:
            return its
        low = {name[:-4]: part["down"] @ part["up"] for name, part in its["attention"].items() if name.endswith("_low")}
        its["attention"]["qkv"] = its["attention"]["qkv"] + np.concatenate([low[name] for name in "qkv"], 1)
        its["attention"]["out"] = its["attention"]["out"] + low["out"]
        for name in ("gate", "up", "out"):
            part = its["feed_forward"][f"{name}_low"]
            change = part["down"] @ part["up"]
            its["feed_forward"][name] = its["feed_forward"][name] + (change if name == "out" else change.T)
        return its

    def row(self, tokens: Any, prompt: int | None = None) -> tuple[Any, Any, Any]:
        """Logits [S, V], loops [S], and states after every loop [B, S, h], repeated after an early exit.

        Args:
            tokens: [S].
            prompt: positions from here on stop early; None: none does.
        """
        c, logits, loops = self.config, [], []
        states = np.zeros((c.depth, len(tokens), c.hidden_size))
        for position, token in enumerate(tokens):
            x, taken = self.params["embedding"][token], c.depth
            if c.ends:
                x = self.layer(self.params["first"], x, position, "first")
            for l, (k, b) in enumerate(self.order()):
                before = x if l % c.layers == 0 else before  # noqa: F821
                x = self.layer(self.weights(k, b), x, position, l)
                if "sequence" in c.sharing or (l + 1) % c.layers:
                    continue
                states[b:, position] = x
                if prompt is not None and position >= prompt and b + 1 < c.depth and self.stops(x, before):
                    taken = b + 1
                    self.refill(x, position, b)
                    break
            if c.ends:
                x = self.layer(self.params["last"], x, position, "last")
            logits.append(self.read(x))
            loops.append(taken)
        return np.stack(logits), np.array(loops), states

    def read(self, x: Any) -> Any:
        """Logits of a state."""
        head = self.params["embedding" if self.config.tied_head else "head"]
        return self.norm(x, self.params["final_norm"]) @ head.T

    def stops(self, x: Any, before: Any) -> bool:
        """Whether a position goes no further."""
        second, first = np.sort(softmax(self.read(x)))[-2:]
        sure = self.config.exit_confidence < 1 and first - second > self.config.exit_confidence
        settled = np.linalg.norm(x - before) / np.linalg.norm(x) < self.config.exit_change
        return bool(sure or settled)

    def refill(self, x: Any, position: int, last: int) -> None:
        """Keys and values of the loops after `last`."""
        layers = self.config.layers
        for l, (k, b) in enumerate(self.order()):
            if b <= last:
                continue
            if self.config.refill == "share":
                self.kept.setdefault(l, {})[position] = self.kept[last * layers + k][position]
            else:
                its = self.weights(k, b)
                self.split(its["attention"], self.before("attention", its, x), position, l)

    def layer(self, its: Any, x: Any, position: int, place: Any) -> Any:
        """x + f(N(x)) or x + N(f(x)), twice."""
        q = self.split(its["attention"], self.before("attention", its, x), position, place)
        x = x + self.behind("attention", its, self.attended(q, position, place) @ its["attention"]["out"])
        gate, up = (its["feed_forward"][name] @ self.before("mlp", its, x) for name in ("gate", "up"))
        return x + self.behind("mlp", its, (gate / (1 + np.exp(-gate)) * up) @ its["feed_forward"]["out"])

    def before(self, name: str, its: Any, x: Any) -> Any:
        return self.norm(x, its[f"{name}_norm"]["scale"]) if self.config.form == "pre_norm" else x

    def behind(self, name: str, its: Any, x: Any) -> Any:
        return self.norm(x, its[f"{name}_out_norm"]["scale"]) if self.config.form == "branch_norm" else x

    def norm(self, x: Any, scale: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_epsilon) * scale

    def split(self, its: Any, x: Any, position: int, place: Any) -> Any:
        """Queries [n, d]; keys and values are kept."""
        c = self.config
        n, kv, d = c.heads, c.kv_heads, c.head_size
        q, k, v = np.split(x @ its["qkv"], [n * d, (n + kv) * d])
        if c.queries == "norm":
            q, k = self.norm(q, its["q_norm"]["scale"]), self.norm(k, its["k_norm"]["scale"])
        q, k = q.reshape(n, d), k.reshape(kv, d)
        if c.queries == "head_norm":
            q, k = self.norm(q, its["q_norm"]["scale"]), self.norm(k, its["k_norm"]["scale"])
        self.kept.setdefault(place, {})[position] = self.turned(k, position), v.reshape(kv, d)
        return self.turned(q, position)

    def attended(self, q: Any, position: int, place: Any) -> Any:
        seen, out = [self.kept[place][other] for other in range(position + 1)], []
        for head, query in enumerate(q):
            group = head * self.config.kv_heads // self.config.heads
            scores = np.array([query @ keys[group] for keys, _ in seen]) / np.sqrt(self.config.head_size)
            out.append(softmax(scores) @ np.stack([values[group] for _, values in seen]))
        return np.concatenate(out)

    def turned(self, x: Any, position: int) -> Any:
        """RoPE as complex numbers, with its frequencies as transformers' `llama3` has them."""
        c, half = self.config, x.shape[-1] // 2
        angles = position * c.rope_base ** (-np.arange(half) / half)
        if c.rope_factor != 1:
            angles = position * np.array([scaled(f, c) for f in c.rope_base ** (-np.arange(half) / half)])
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], -1)


def scaled(frequency: float, config: Any) -> float:
    """By wavelengths: long ones grow by the factor, short ones stay, and between it goes over."""
    wavelength = 2 * np.pi / frequency
    if wavelength > config.rope_length / config.rope_low:
        return frequency / config.rope_factor
    if wavelength < config.rope_length / config.rope_high:
        return frequency
    smooth = (config.rope_length / wavelength - config.rope_low) / (config.rope_high - config.rope_low)
    return (1 - smooth) * frequency / config.rope_factor + smooth * frequency


def at(tree: Any, index: Any) -> Any:
    """Every leaf at an index."""
    return {name: at(node, index) if isinstance(node, dict) else node[index] for name, node in tree.items()}
