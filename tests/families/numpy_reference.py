"""The forward pass of docs/model.md in plain float64 NumPy: loops over tokens, heads and experts, no JAX.

Written from the specification alone, so that an error in the model cannot hide in a shared line of code. Only the
layout of the weights is the model's: fused q/k/v with the heads of q first, gate before up, one leading axis of
layers in LA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dreamer_jax.config.models.dreamer import DreamerConfig

Tree = dict[str, Any]
EPSILON = 1e-6


class Forward(NamedTuple):
    """What the reference computes.

    Attributes:
        logits: [B, S, V] float64; rows of padding are zero.
        counts: router name -> [L, E] int, padding excluded.
        margin: the smallest gap between a selected and the best unselected expert, over all real tokens: when it is
            far above float32's rounding, no selection can differ by rounding.
    """

    logits: np.ndarray
    counts: dict[str, np.ndarray]
    margin: float


def forward(
    config: DreamerConfig,
    params: Tree,
    bias: dict[str, Any],
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    positions: np.ndarray,
    depth: int | None = None,
    texts: np.ndarray | None = None,
) -> Forward:
    """Logits of a packed batch, token by token.

    Args:
        config: sizes and variant.
        params, bias: the model's trees.
        tokens, segment_ids, positions: [B, S]; segment 0 is padding.
        depth: L of this pass; None for the trained one.
        texts: [M, e], embeddings that parameter attention makes its keys and values of.
    """
    params, bias = float64(params), float64(bias)
    pass_ = Pass(config, params, bias, depth or config.depth)
    pass_.texts = None if texts is None else texts.astype(np.float64)
    logits = np.zeros((*tokens.shape, config.vocab_size))
    for row in range(len(tokens)):
        for document in np.unique(segment_ids[row]):
            if document == 0:
                continue
            where = np.flatnonzero(segment_ids[row] == document)
            x = params["embedding"][tokens[row, where]]
            logits[row, where] = pass_.document(x, positions[row, where]) @ params["head"].T
    return Forward(logits, pass_.counts, pass_.margin)


class Pass:
    """One forward pass over documents, adding up the counts of all of them."""

    texts: np.ndarray | None = None

    def __init__(self, config: DreamerConfig, params: Tree, bias: Tree, depth: int) -> None:
        self.config, self.params, self.bias, self.depth = config, params, bias, depth
        self.counts = {name: np.zeros((depth, b.shape[-1]), int) for name, b in bias.items()}
        self.margin = np.inf
        self.norms_each_depth = config.recurrent and config.residual_norm

    def document(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Hidden states before the head, [n, h], of one document's embeddings [n, h]."""
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.states: list[np.ndarray] = []
        entered = x
        for l in range(self.depth):
            layer = self.layer(l)
            if self.config.injection == "diagonal":
                x = inject(layer["injection"], x, entered)
            y = self.mixture(layer, x, positions, l)
            x = rms_norm(y, layer["residual_norm"]["scale"]) if self.norms_each_depth else y
            self.states.append(x)
        return self.read(x)

    def read(self, x: np.ndarray) -> np.ndarray:
        """What the head is applied to, from the states after any depth."""
        if self.config.decoding_size:
            x = x + self.decoded(x)
        elif self.norms_each_depth:
            return x
        return rms_norm(x, self.params["final_norm"]["scale"])

    def decoded(self, x: np.ndarray) -> np.ndarray:
        """What the decoding layer adds, token by token."""
        its, added = self.params["decoding"]["feed_forward"], np.zeros_like(x)
        for i, row in enumerate(rms_norm(x, self.params["decoding"]["norm"]["scale"])):
            gate = its["gate"] @ row
            added[i] = (gate * sigmoid(gate) * (its["up"] @ row)) @ its["out"]
        return added

    def layer(self, l: int) -> Tree:
        """The weights applied at depth l."""
        return self.params["layer"] if self.config.recurrent else _take(self.params["layers"], l)

    def mixture(self, layer: Tree, x: np.ndarray, positions: np.ndarray, l: int) -> np.ndarray:
        """Eq. 4, 5 or 6."""
        scale = 1 / self.depth if self.config.residual_scale == "depth" else 1
        gate = self.gates(layer, x, l)

        def da(y: np.ndarray) -> np.ndarray:
            return over_depths(y) + (over_slots(y) if self.config.pa_slots else 0)

        def over_slots(y: np.ndarray) -> np.ndarray:
            if l % self.config.pa_every:
                return np.zeros_like(y)
            return gate["parameter"] * scale * self.parameter_attention(layer, y, l)

        def over_depths(y: np.ndarray) -> np.ndarray:
            if not self.config.depth_attention or l % self.config.da_every:
                return np.zeros_like(y)
            normed = rms_norm(y, layer["depth_norm"]["scale"])
            return gate["depth"] * scale * self.depth_attention(layer["depth_attention"], normed, l)

        def sa(y: np.ndarray) -> np.ndarray:
            if l % self.config.sa_every:
                return np.zeros_like(y)
            normed = rms_norm(y, layer["sequence_norm"]["scale"])
            return gate["sequence"] * scale * self.sequence_attention(layer["sequence_attention"], normed, positions, l)

        def ea(y: np.ndarray) -> np.ndarray:
            normed = rms_norm(y, layer["expert_norm"]["scale"])
            return scale * self.expert_attention(layer["expert_attention"], normed, l, gate["expert"])

        if self.config.mixing == "sequential":
            y = x + da(x)
            y = y + sa(y)
            return y + ea(y)
        if self.config.mixing == "parallel_attention":
            y = x + da(x) + sa(x)
            return y + ea(y)
        return x + da(x) + sa(x) + ea(x)

    def gates(self, layer: Tree, x: np.ndarray, l: int) -> dict[str, np.ndarray]:
        """Dimension -> [n, 1]: twice the sigmoid where a token takes it, else zero; one where there is no choice."""
        c, n = self.config, len(x)
        there = ["sequence", *["depth"] * c.depth_attention, *["parameter"] * bool(c.pa_slots), "expert"]
        if not c.dimensions_per_token:
            return {name: np.ones((n, 1)) for name in there}
        logits = self.router_logits(layer["dimensions"]["router"], rms_norm(x, layer["dimension_norm"]["scale"]), l)
        found = np.zeros((n, len(there)))
        for i in range(n):
            for j in self.select("dimensions", logits[i], l, c.dimensions_per_token):
                found[i, j] = 2 * sigmoid(logits[i, j])
        return {name: found[:, j : j + 1] for j, name in enumerate(there)}

    def sequence_attention(self, weights: Tree, x: np.ndarray, positions: np.ndarray, l: int) -> np.ndarray:
        """Causal grouped-query attention over the tokens of one document."""
        c = self.config
        choice = self.choose_projection("sequence_attention", weights["projections"], x, l)
        q, k, v = self.heads(weights, choice, x, c.sa_heads, c.sa_kv_heads, c.sa_head_size)
        for i, position in enumerate(positions):
            q[i], k[i] = rope(q[i], position, c.sa_rope_base), rope(k[i], position, c.sa_rope_base)
        mixed = np.zeros_like(q)
        for i in range(len(x)):
            for head in range(c.sa_heads):
                shared = head // (c.sa_heads // c.sa_kv_heads)
                mixed[i, head] = attend(q[i, head], k[: i + 1, shared], v[: i + 1, shared])
        return self.project(weights["projections"], "out", choice, mixed.reshape(len(x), -1))

    def depth_attention(self, weights: Tree, x: np.ndarray, l: int) -> np.ndarray:
        """The same over the depths 0..l of each token, or those that the settings leave of them."""
        c = self.config
        choice = self.choose_projection("depth_attention", weights["projections"], x, l)
        if c.da_form != "softmax":
            read = getattr(self, c.da_form)(weights, choice, x, l)
            return self.project(weights["projections"], "out", choice, read)
        q, k, v = self.heads(weights, choice, x, c.da_heads, c.da_kv_heads, c.da_head_size)
        q, k = self.told(q, weights, l), self.told(k, weights, l)
        self.keys.append(k)
        self.values.append(v)
        seen = self.depths_seen(len(self.keys) - 1)
        keys, values = np.stack([self.keys[i] for i in seen]), np.stack([self.values[i] for i in seen])
        mixed = np.zeros_like(q)
        for i in range(len(x)):
            for head in range(c.da_heads):
                shared = head // (c.da_heads // c.da_kv_heads)
                mixed[i, head] = attend(q[i, head], keys[:, i, shared], values[:, i, shared])
        return self.project(weights["projections"], "out", choice, mixed.reshape(len(x), -1))

    def gated_delta(self, weights: Tree, choice: list[tuple[int, float]], x: np.ndarray, l: int) -> np.ndarray:
        """S (I - b k k^T) a + b v k^T for each token and key/value head, by whole matrices."""
        c, n = self.config, len(x)
        size, kv = c.da_head_size, c.da_kv_heads
        parts = self.project(weights["projections"], "qkv", choice, x)
        q, k, v = (part.reshape(n, -1, size) for part in np.split(parts, [c.da_heads * size, -kv * size], axis=-1))
        q, k = (self.told(unit(part), weights, l) for part in (q, k))
        k = unit(k)
        gates = x @ weights["gates"]
        states = self.keys[-1] if self.keys else np.zeros((n, kv, size, size))
        states, read = states.copy(), np.zeros_like(q)
        for i in range(n):
            for head in range(kv):
                a = np.exp(-np.exp(weights["fall"][head]) * np.log1p(np.exp(gates[i, head] + weights["rate"][head])))
                b, key = sigmoid(gates[i, kv + head]), k[i, head]
                forget = a * (np.eye(size) - b * np.outer(key, key))
                states[i, head] = states[i, head] @ forget + b * np.outer(v[i, head], key)
            for head in range(c.da_heads):
                read[i, head] = states[i, head // (c.da_heads // kv)] @ q[i, head]
        self.keys.append(states)
        return read.reshape(n, -1)

    def gated_recurrent(self, weights: Tree, choice: list[tuple[int, float]], x: np.ndarray, l: int) -> np.ndarray:
        """(1 - z) s + z v for each channel."""
        c, n = self.config, len(x)
        parts = self.project(weights["projections"], "qkv", choice, x)
        q, v = np.split(parts, [c.da_heads * c.da_head_size], axis=-1)
        z = sigmoid(x @ weights["gates"] + weights["offset"])
        state = z * v + (1 - z) * (self.keys[-1] if self.keys else 0)
        self.keys.append(state)
        shared = np.repeat(state.reshape(n, c.da_kv_heads, -1), c.da_heads // c.da_kv_heads, axis=1)
        return sigmoid(q) * shared.reshape(n, -1)

    def parameter_attention(self, layer: Tree, x: np.ndarray, l: int) -> np.ndarray:
        """Over learned slots, or those made of each text; every head has its own."""
        weights, c = layer["parameter_attention"], self.config
        x = rms_norm(x, layer["parameter_norm"]["scale"])
        q = rms_norm((x @ weights["query"]).reshape(len(x), c.pa_heads, -1), weights["q_norm"]["scale"])
        keys, values = (self.slots(weights[name]) for name in ("keys", "values"))
        q, k = self.told(q, weights, l), rms_norm(keys, weights["k_norm"]["scale"])
        read = np.zeros_like(q)
        for i in range(len(x)):
            for head in range(c.pa_heads):
                read[i, head] = attend(q[i, head], k[head], values[head])
        return read.reshape(len(x), -1) @ weights["output"]

    def slots(self, weights: np.ndarray) -> np.ndarray:
        """[n, M, d]: learned, or of each text what its embedding is mapped to, cut into heads."""
        if self.texts is None:
            return weights
        return np.stack([np.split(text @ weights, self.config.pa_heads) for text in self.texts], axis=1)

    def depths_seen(self, l: int) -> list[int]:
        """Depths that depth l attends to: from itself down in steps, as many as the window has."""
        seen = list(range(l, -1, -self.config.da_dilation))
        return seen[: self.config.da_window] if self.config.da_window else seen

    def expert_attention(self, weights: Tree, x: np.ndarray, l: int, gate: np.ndarray) -> np.ndarray:
        """Top-k SwiGLU experts, weighted by normalised sigmoids, of the tokens whose gate [n, 1] isn't zero."""
        logits = self.router_logits(weights["router"], x, l)
        y = np.zeros_like(x)
        for i in np.flatnonzero(gate):
            chosen = self.select("expert_attention", logits[i], l, self.config.experts_per_token)
            scores = sigmoid(logits[i, chosen])
            for expert, weight in zip(chosen, scores / scores.sum(), strict=True):
                gate_up = weights["gate_up"][expert] @ x[i]
                left, up = gate_up[: self.config.expert_size], gate_up[self.config.expert_size :]
                y[i] += weight * ((left * sigmoid(left) * up) @ weights["down"][expert])
        return gate * y

    def choose_projection(self, name: str, projections: Tree, x: np.ndarray, l: int) -> list[tuple[int, float]]:
        """Expert and score of every token in an attention MoE; plain matrices are one expert with score 1."""
        if not (self.config.recurrent and self.config.attention_experts):
            return [(0, 1.0)] * len(x)
        logits = self.router_logits(projections["router"], x, l)
        chosen = [self.select(name, row, l, 1)[0] for row in logits]
        return [(expert, float(sigmoid(row[expert]))) for expert, row in zip(chosen, logits, strict=True)]

    def project(self, projections: Tree, name: str, choice: list[tuple[int, float]], x: np.ndarray) -> np.ndarray:
        """Eq. 7: s * x W_e + s * x W_shared, or its first term alone; x W of plain matrices."""
        if not (self.config.recurrent and self.config.attention_experts):
            return x @ projections[name]
        pairs = list(zip(choice, x, strict=True))
        routed = np.stack([score * (row @ projections[name][expert]) for (expert, score), row in pairs])
        if not self.config.shared_expert:
            return routed
        return routed + np.stack([score * (row @ projections[f"{name}_shared"]) for (_, score), row in pairs])

    def heads(
        self, weights: Tree, choice: list[tuple[int, float]], x: np.ndarray, heads: int, kv_heads: int, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q [n, heads, d], k and v [n, kv, d]; q and k normalised per head."""
        qkv = self.project(weights["projections"], "qkv", choice, x)
        q, k, v = np.split(qkv, [heads * size, (heads + kv_heads) * size], axis=-1)
        q = rms_norm(q.reshape(len(x), heads, size), weights["q_norm"]["scale"])
        k = rms_norm(k.reshape(len(x), kv_heads, size), weights["k_norm"]["scale"])
        return q, k, v.reshape(len(x), kv_heads, size)

    def router_logits(self, router: Tree, x: np.ndarray, l: int) -> np.ndarray:
        """[n, E]: queries, rotated by depth unless that is left out, against unrotated keys."""
        queries = rms_norm(x @ router["query"], router["query_norm"]["scale"])
        if self.config.router_depth_code:
            queries = self.told(queries, router, l)
        keys = rms_norm(router["keys"], router["keys_norm"]["scale"])
        return queries @ keys.T / np.sqrt(self.config.router_size)

    def select(self, name: str, logits: np.ndarray, l: int, k: int) -> list[int]:
        """Indices of the k largest logits + b of one token; counts them and remembers the margin."""
        b = self.bias[name] if self.config.recurrent else self.bias[name][l]
        if name == "expert_attention" and self.config.expert_subset != "all":
            logits = np.where(self.may_choose(l), logits, -np.inf)
        order = np.argsort(-(logits + b), kind="stable")
        if k < len(order):
            self.margin = min(self.margin, float((logits + b)[order[k - 1]] - (logits + b)[order[k]]))
        for expert in order[:k]:
            self.counts[name][l, expert] += 1
        return [int(e) for e in order[:k]]

    def may_choose(self, l: int) -> np.ndarray:
        """[E] bool: the experts of depth l, by asking for every place of their list where its stretch begins."""
        c = self.config
        E, L, l = c.num_experts, c.depth, min(l, c.depth - 1)
        step = round(0.6180339887 * E)
        while np.gcd(step, E) != 1:
            step += 1
        found = np.zeros(E, bool)
        for place in range(E):
            if c.expert_subset == "sliding":
                n = int(np.ceil(E * c.expert_subset_share))
                begin = int(l * (E - n) / (L - 1))
                end = begin + n
            else:
                cuts = [E * j // (int(np.ceil(np.log2(L))) + 1) for j in range(99)]
                j = next(j for j in range(99) if cuts[j] <= place < cuts[j + 1])
                groups, size = min(2**j, L), cuts[j + 1] - cuts[j]
                n, group = int(np.ceil(size / groups)), l * groups // L
                begin = cuts[j] + (int(group * (size - n) / (groups - 1)) if groups > 1 else 0)
                end = begin + n
            found[place * step % E] = begin <= place < end
        return found

    def told(self, x: np.ndarray, weights: Tree, l: int) -> np.ndarray:
        """Rotated by depth; or, where depths are learned, with the vector of this one, or one between two."""
        if self.config.depth_counters != "learned":
            return self.depth_rope(x, l)
        rows, last = weights["depth_signals"], self.config.depth - 1
        s = max(1.0, (self.depth - 1) / last) if self.config.depth_scaling == "interpolated" else 1.0
        place = min(l / s, last)
        return x + np.stack([np.interp(place, np.arange(last + 1), column) for column in rows.T])

    def depth_rope(self, x: np.ndarray, l: int) -> np.ndarray:
        """First half of the head rotated by l, second by L - 1 - l, each a full RoPE of half the size; or the settings'
        other ways."""
        config = self.config
        counters = {"both": [l, self.depth - 1 - l], "up": [l], "none": [], "learned": []}[config.depth_counters]
        s, base = 1.0, config.depth_rope_base
        if self.depth > config.depth:
            s = (self.depth - 1) / (config.depth - 1)
        if config.depth_scaling == "ntk":
            size = x.shape[-1] // len(counters)
            base *= s ** (size / (size - 2))
        elif config.depth_scaling == "interpolated":
            counters = [place / s for place in counters]
        parts = np.split(x, max(len(counters), 1), axis=-1)
        if not counters:
            return x
        return np.concatenate([rope(part, place, base) for part, place in zip(parts, counters, strict=True)], axis=-1)


def unit(x: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def inject(weights: Tree, x: np.ndarray, entered: np.ndarray) -> np.ndarray:
    """exp(-dt exp(A)) x + dt B e, dt = softplus(rate), e the normed input."""
    dt = np.log1p(np.exp(weights["rate"]))
    e = rms_norm(entered, weights["norm"]["scale"])
    return np.exp(-dt * np.exp(weights["fall"])) * x + dt * (e @ weights["matrix"])


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def rope(x: np.ndarray, position: float, base: float) -> np.ndarray:
    """Rotate-half RoPE of the last axis (size d): pair (i, i + d/2) turns by position * base^(-2i/d)."""
    half = x.shape[-1] // 2
    rotated = np.empty_like(x)
    for i in range(half):
        angle = float(position) * base ** (-2 * i / x.shape[-1])
        a, b = x[..., i], x[..., i + half]
        rotated[..., i] = a * np.cos(angle) - b * np.sin(angle)
        rotated[..., i + half] = b * np.cos(angle) + a * np.sin(angle)
    return rotated


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q.K^T / sqrt(d)) V of one query [d] over keys and values [n, d]."""
    scores = k @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ v


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def float64(tree: Any) -> Any:
    """The same tree of float64 arrays."""
    if isinstance(tree, dict):
        return {name: float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)


def _take(tree: Any, index: int) -> Any:
    if isinstance(tree, dict):
        return {name: _take(value, index) for name, value in tree.items()}
    return tree[index]
