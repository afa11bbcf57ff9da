"""Hugging Face's Qwen3-MoE generating greedily: what `dreamer bench generate` compares with."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dreamer_jax.benchmarks.qwen3 import EXPERTS, cache_name, device, qwen
from dreamer_jax.config.sections import Config

WAYS = (*EXPERTS, "batched_mm")
"""transformers' ways to compute the experts, all tried: with few tokens each may be the fastest."""

TRIED = 16
"""Tokens of a trial."""


class QwenGeneration:
    """Greedy generation with a growing cache, token by token, without the bookkeeping of `generate`.

    Args:
        config: an LA configuration.
        experts: one of `WAYS`.
    """

    def __init__(self, config: Config, experts: str):
        self.experts = experts
        self._model: Any = qwen(config, experts).eval()
        self._cache = cache_name(self._model)

    def __call__(self, prompts: np.ndarray, tokens: int) -> tuple[float, float]:
        """Seconds to the first token and to the last of `tokens`, after prompts [B, S] of equal length."""
        import torch

        began = time.perf_counter()
        first = 0.0
        with torch.inference_mode():
            inputs, cache = torch.from_numpy(prompts).to(device()).long(), None
            for number in range(tokens):
                out = self._model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{self._cache: cache})
                logits, cache = out.to_tuple()[:2]
                inputs = logits[:, -1].argmax(-1, keepdim=True)
                inputs.tolist()  # a caller would have it now
                if number == 0:
                    first = time.perf_counter() - began
        return first, time.perf_counter() - began


def fastest_qwen3(config: Config, prompts: np.ndarray, tokens: int) -> tuple[QwenGeneration, dict[str, float]]:
    """The quickest of `WAYS` for these prompts, and the shorter of two runs of each over few tokens, in seconds."""
    seconds: dict[str, float] = {}
    best: QwenGeneration | None = None
    for experts in WAYS:
        peer = QwenGeneration(config, experts)
        seconds[experts] = min(peer(prompts, min(tokens, TRIED))[1] for _ in range(2))
        if best is None or seconds[experts] < seconds[best.experts]:
            best = peer
    assert best is not None
    return best, seconds
