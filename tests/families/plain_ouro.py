"""Ouro by its equations: NumPy in float64, one position, one head and one loop after the other."""

from __future__ import annotations

from typing import Any

import numpy as np


def wide(params: Any) -> Any:
    """Parameters in float64."""
    if isinstance(params, dict):
        return {name: wide(value) for name, value in params.items()}
    return np.asarray(params, np.float64)


class PlainOuro:
    """A row of tokens; keys and values of earlier positions in dictionaries.

    Args:
        config: the section `model`.
        params: in float64.
    """

    def __init__(self, config: Any, params: Any):
        self.config, self.params = config, params
        self.kept: dict[tuple[int, int], dict[int, Any]] = {}  # (loop, layer) -> position -> keys and values

    def row(self, tokens: Any, loops: int, threshold: float = 2.0, prompt: int = 0) -> tuple[Any, Any]:
        """States after every loop [R, S, h] and lambda [R, S]; a position that stops early repeats its last ones.

        Args:
            tokens: [S].
            loops: R.
            threshold: q; positions from `prompt` on stop by it.
            prompt: positions that go through all loops, together: with the keys of the last loop only, every loop of
                theirs still sees its own.
        """
        states, gates = np.zeros((loops, len(tokens), self.config.hidden_size)), np.zeros((loops, len(tokens)))
        for t in range(loops):
            for position in range(prompt):
                x = states[t - 1, position] if t else self.params["embedding"][tokens[position]]
                states[t, position], gates[t, position] = self.loop(x, position, t)
        for position in range(prompt, len(tokens)):
            x, going_on = self.params["embedding"][tokens[position]], 1.0
            for t in range(loops):
                x, gate = self.loop(x, position, t)
                states[t:, position], gates[t:, position] = x, gate
                going_on *= 1 - gate
                if 1 - going_on >= threshold:
                    break
        return states, gates

    def loop(self, x: Any, position: int, t: int) -> tuple[Any, float]:
        """x_{t-1} -> x_t and lambda_t."""
        for j in range(self.config.layers):
            layer = self.params["layers"][str(j)]
            attended = self.attention(layer["attention"], self.norm(x, layer["attention_norm"]), position, (t, j))
            x = x + self.norm(attended, layer["attention_out_norm"])
            normed = self.norm(x, layer["mlp_norm"])
            gate, up = (layer["feed_forward"][name] @ normed for name in ("gate", "up"))
            x = x + self.norm((gate / (1 + np.exp(-gate)) * up) @ layer["feed_forward"]["out"], layer["mlp_out_norm"])
        x = self.norm(x, {"scale": self.params["final_norm"]})
        logit = x @ self.params["exit_gate"]["weight"] + self.params["exit_gate"]["bias"][0]
        return x, 1 / (1 + np.exp(-logit))

    def norm(self, x: Any, weights: Any) -> Any:
        return x / np.sqrt((x**2).mean() + self.config.norm_epsilon) * weights["scale"]

    def attention(self, weights: Any, x: Any, position: int, place: tuple[int, int]) -> Any:
        c = self.config
        n, kv, d = c.heads, c.kv_heads, c.head_size
        q, k, v = np.split(x @ weights["qkv"], [n * d, (n + kv) * d])
        keys = [self.turned(head, position) for head in k.reshape(kv, d)]
        self.kept.setdefault(place, {})[position] = keys, v.reshape(kv, d)
        seen = [self.of(place, other, own=other == position) for other in range(position + 1)]
        out = []
        for head, query in enumerate(q.reshape(n, d)):
            query, group = self.turned(query, position), head * kv // n
            scores = np.array([query @ keys[group] for keys, _ in seen]) / np.sqrt(d)
            shares = np.exp(scores - scores.max())
            out.append(shares / shares.sum() @ np.stack([values[group] for _, values in seen]))
        return np.concatenate(out) @ weights["out"]

    def of(self, place: tuple[int, int], position: int, own: bool) -> Any:
        """What is seen of a position: its keys of this loop, or of the last it has gone through."""
        (t, layer), kept = place, self.kept
        loops = [loop for loop, j in kept if j == layer and position in kept[loop, j]]
        last = max(loops) if self.config.cache == "last" and not own else t
        return kept[min(last, max(loops)), layer][position]

    def turned(self, x: Any, position: int) -> Any:
        """RoPE as complex numbers."""
        half = len(x) // 2
        angles = position * self.config.rope_base ** (-np.arange(half) / half)
        pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag])


def exit_shares(gates: Any) -> Any:
    """p_t of lambda [R, ...], by the products of section 3.2; the last one is what is left."""
    shares, left = [], np.ones(gates.shape[1:])
    for gate in gates[:-1]:
        shares.append(gate * left)
        left = left * (1 - gate)
    return np.stack([*shares, left])
