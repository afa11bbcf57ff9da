"""MoEUT by its equations: NumPy in float64, one position, one head and one expert after the other."""

from __future__ import annotations

from typing import Any

import numpy as np


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    shares = np.exp(x - x.max())
    return shares / shares.sum()


def entropy(p: Any) -> float:
    return float(-sum(each * np.log(each) for each in p))


class PlainMoeut:
    """A row of tokens; keys, values and what routers said of earlier positions in dictionaries.

    Args:
        config: the section `model`.
        params: in float64.
    """

    def __init__(self, config: Any, params: Any):
        self.config, self.params = config, params
        self.kept: dict[tuple[int, int, int], list[Any]] = {}  # (repeat, layer, head) -> keys and values
        self.said: dict[tuple[int, str, int], list[Any]] = {}  # (layer, router, head) -> softmax of logits

    def row(self, tokens: Any, repeats: int) -> Any:
        """x after every repeat, [R, S, h]."""
        states = np.zeros((repeats, len(tokens), self.config.hidden_size))
        for position, token in enumerate(tokens):
            x = self.params["embedding"][token]
            for repeat in range(repeats):
                for g in range(self.config.layers):
                    x = x + self.attention(x, position, repeat, g)
                    x = x + self.experts(x, g)
                states[repeat, position] = x
        return states

    def logits(self, x: Any) -> Any:
        """[..., h] -> [..., V]."""
        normed = np.apply_along_axis(self.norm, -1, x, self.params["out_norm"])
        return normed @ self.params["head"].T + self.params["head_bias"]

    def regularisers(self) -> tuple[float, float]:
        """-H of the mean probabilities over all positions and repeats: of the feed-forward networks, the attention."""
        totals = [0.0, 0.0]
        for (_, router, _), said in self.said.items():
            weight = 1 if router == "experts" else 1 / self.config.heads
            totals[router != "experts"] -= weight * entropy(np.mean(said, axis=0))
        return totals[0], totals[1]

    def norm(self, x: Any, weights: Any) -> Any:
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weights["scale"] + weights["bias"]

    def chosen(self, router: tuple[int, str, int], logits: Any, count: int) -> list[tuple[int, float]]:
        """The experts of the largest logits and their scores."""
        self.said.setdefault(router, []).append(softmax(logits))
        return [(e, sigmoid(logits[e])) for e in np.argsort(-logits)[:count]]

    def experts(self, x: Any, g: int) -> Any:
        layer = self.params["layers"][str(g)]
        weights, z = layer["feed_forward"], self.norm(x, layer["mlp_norm"])
        out = np.zeros_like(x)
        for e, score in self.chosen((g, "experts", 0), weights["expert_sel"] @ z, self.config.experts_per_token):
            out += score * np.maximum(x @ weights["keys"][e], 0) @ weights["values"][e]
        return out

    def attention(self, x: Any, position: int, repeat: int, g: int) -> Any:
        c, layer = self.config, self.params["layers"][str(g)]
        weights, z, d = layer["attention"], self.norm(x, layer["attention_norm"]), c.head_size
        out = np.zeros_like(x)
        for head in range(c.heads):
            own = slice(head * d, (head + 1) * d)
            query = self.turned(z @ weights["q"][:, own], position) * d**-0.25
            key = self.turned(z @ weights["k"][:, own], position) * d**-0.25
            kept = self.kept.setdefault((repeat, g, head), [])
            kept.append((key, self.value(weights, x, z, g, head, own)))
            assert len(kept) == position + 1
            shares = softmax(np.array([query @ key for key, _ in kept]))
            attended = sum(share * value for share, (_, value) in zip(shares, kept, strict=True))
            out += self.output(weights, attended, z, g, head, own)
        return out

    def value(self, weights: Any, x: Any, z: Any, g: int, head: int, own: slice) -> Any:
        c = self.config
        if c.attention_experts == 1:
            return x @ weights["v"][:, own]
        first = head * c.attention_experts
        logits = weights["sel_v"][first : first + c.attention_experts] @ z
        chosen = self.chosen((g, "values", head), logits, c.attention_experts_per_token)
        return sum(score * x @ weights["v"][first + e] for e, score in chosen)

    def output(self, weights: Any, attended: Any, z: Any, g: int, head: int, own: slice) -> Any:
        c = self.config
        if c.attention_experts == 1:
            return sigmoid(weights["sel_o"][head] @ z) * attended @ weights["o"][own]
        first = head * c.attention_experts
        logits = weights["sel_o"][first : first + c.attention_experts] @ z
        chosen = self.chosen((g, "outputs", head), logits, c.attention_experts_per_token)
        return sum(score * attended @ weights["o"][first + e] for e, score in chosen)

    def turned(self, x: Any, position: int) -> Any:
        """RoPE of the first half, as complex numbers; the rest as it is."""
        quarter = len(x) // 4
        angles = position * self.config.rope_base ** (-np.arange(quarter) / quarter)
        pairs = (x[:quarter] + 1j * x[quarter : 2 * quarter]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag, x[2 * quarter :]])
