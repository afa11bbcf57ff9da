"""The depth-recurrent transformer in PyTorch, in one file that needs torch and safetensors only.

    model = DepthRecurrent.load("folder")
    logits = model(tokens, read, visible=visible, steps=20)  # [20, B, C], after every step

One block with a gate is applied to the states of all positions again and again; a classifier reads the states of one
or two positions (Chen, 2026, Thinking Deeper, Not Longer). Branches are computed in the dtype of the matrices; the
state, norms, softmax, gate and classifier in float32. In comments, B batch, S sequence, T steps, h hidden size, n
heads, d head size, C classes, R positions that are read.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A map whose bias is float32 whatever its matrix is, and is cast to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d) + M) V for every head, and a map on all heads together."""

    def __init__(self, size: int, heads: int, rope_base: float):
        super().__init__()
        self.heads, self.rope_base = heads, rope_base  # a base of 0: no positions
        self.in_proj, self.out_proj = Linear(size, 3 * size), Linear(size, size)

    def forward(self, x: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        """[B, S, h], [B, S, S] bool, [B, S] -> [B, S, h]; a position that sees nothing gets the bias alone."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.in_proj(x).chunk(3, -1))
        if self.rope_base:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).float()
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        return self.out_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(-2))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE in halves: [B, n, S, d], element i is paired with element i + d/2."""
        half = x.shape[-1] // 2
        frequency = self.rope_base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = positions[:, None, :, None].float() * frequency
        first, second = x.float().chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class FeedForward(nn.Module):
    """W_2 f(W_1 x + b_1) + b_2."""

    def __init__(self, size: int, inner: int, activation: str):
        super().__init__()
        self.activation = {"gelu": F.gelu, "relu": F.relu}[activation]
        self.inward, self.outward = Linear(size, inner), Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.activation(self.inward(x)))


class Classifier(nn.Module):
    """Logits of the classes from the states that are read."""

    def __init__(self, size: int, classes: int, readout: str):
        super().__init__()
        self.hidden = Linear(2 * size, size) if readout == "pair" else None
        self.out = Linear(2 * size if readout == "pair_linear" else size, classes)

    def forward(self, z: Tensor) -> Tensor:
        """[B, R h] float32 -> [B, C]."""
        return self.out(z if self.hidden is None else F.relu(self.hidden(z)))


class DepthRecurrent(nn.Module):
    """The model; `settings` are those of config.json."""

    def __init__(self, settings: dict):
        super().__init__()
        self.settings = settings
        size, base = settings["hidden_size"], settings["rope_base"] if settings["positions"] == "rope" else 0.0
        self.embedding = nn.Embedding(settings["vocab_size"], size)
        self.depth_embedding = nn.Embedding(settings["max_depth"], size) if settings["depth_embedding_std"] else None
        self.attention = Attention(size, settings["heads"], base)
        self.feed_forward = FeedForward(size, settings["mlp_size"], settings["activation"])
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        scaled = bool(settings["layer_scale"])
        self.attention_scale = nn.Parameter(torch.empty(size)) if scaled else None
        self.mlp_scale = nn.Parameter(torch.empty(size)) if scaled else None
        self.gate = nn.Linear(2 * size, size) if settings["gate"] else None
        self.classifier = Classifier(size, settings["classes"], settings["readout"])

    @classmethod
    def load(cls, folder: str) -> DepthRecurrent:
        """The model of a folder."""
        from safetensors.torch import load_file

        model = cls(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
        tensors: dict[str, Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(path)
        model.load_state_dict(tensors, assign=True)
        return model.eval()

    def forward(
        self,
        tokens: Tensor,
        read: Tensor,
        visible: Tensor | None = None,
        segment_ids: Tensor | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """Logits after every step, [T, B, C] float32.

        Args:
            tokens: [B, S].
            read: [B, R], the positions whose states are read.
            visible: [B, S, S] bool, whether row i sees column j; None: all of its document.
            segment_ids: [B, S], documents from 1, 0 for padding; None: one document a row.
            steps: T; None for the most that training drew.
        """
        return self.think(tokens, read, visible, segment_ids, steps)[0]

    def think(self, tokens, read, visible=None, segment_ids=None, steps=None) -> tuple[Tensor, list[Tensor]]:
        """Logits as of `forward`, and the states after every step, each [B, S, h] float32."""
        segments = torch.ones_like(tokens) if segment_ids is None else segment_ids
        seen = segments[:, :, None] == segments[:, None]
        seen = seen if visible is None else seen & visible
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        state = self.embedding(tokens).float()
        rows, states, logits = torch.arange(len(tokens), device=tokens.device)[:, None], [], []
        steps = self.settings["depth"] if steps is None else steps
        most = steps if self.depth_embedding is None else self.settings["max_depth"]
        if not 1 <= steps <= most:
            raise ValueError(f"steps {steps}: must be 1 or more, and at most max_depth {self.settings['max_depth']}")
        for step in range(steps):
            state = self.step(state, step, seen, positions)
            states.append(state)
            logits.append(self.classifier(state[rows, read].flatten(1)))
        return torch.stack(logits), states

    def step(self, state: Tensor, step: int, seen: Tensor, positions: Tensor) -> Tensor:
        """H_{t-1} -> H_t, where t = step + 1."""
        x = state if self.depth_embedding is None else state + self.depth_embedding.weight[step].float()
        x = self.joined(x, lambda x: self.attention(x, seen, positions), self.attention_norm, self.attention_scale)
        x = self.joined(x, self.feed_forward, self.mlp_norm, self.mlp_scale)
        if self.gate is None:
            return x
        z = self.gate(torch.cat([x, state], -1)).sigmoid()
        return z * x + (1 - z) * state

    def joined(self, x: Tensor, branch, norm: nn.LayerNorm, scale: Tensor | None) -> Tensor:
        """x and a branch of it, with the norm in front of the branch or behind the sum."""
        before, dtype = self.settings["norm"] == "pre", self.embedding.weight.dtype
        out = branch((norm(x) if before else x).to(dtype)).float()
        out = out if scale is None else scale * out
        return x + out if before else norm(x + out)
