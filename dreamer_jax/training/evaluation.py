"""Held-out loss, perplexity and exact match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax

from dreamer_jax.data import Data


class Weights(Protocol):
    """What is evaluated: a training state, or a trained model."""

    @property
    def params(self) -> Any:
        """float32 parameters."""

    @property
    def model_state(self) -> Any:
        """The model's own, by collection."""


def evaluate(evaluation_step: Callable[..., Any], place: Callable, state: Weights, data: Data) -> dict[str, float]:
    """Metrics over the held-out batches, and over the harder ones where the configuration asks for them.

    Args:
        evaluation_step: see `make_evaluation_step`.
        place: puts a batch on the devices.

    Returns:
        `heldout/loss`, `heldout/perplexity`, `heldout/exact_match` and the same for `harder/`; a kind without
        batches is left out.
    """
    metrics = {}
    for kind, batches in (("heldout", data.heldout_batches()), ("harder", data.harder_batches())):
        sums = _sum(evaluation_step(state.params, state.model_state, place(batch)) for batch in batches)
        if sums.get("targets"):
            loss = sums["loss"] / sums["targets"]
            metrics[f"{kind}/loss"] = loss
            metrics[f"{kind}/perplexity"] = math.exp(min(loss, 700.0))
            if sums["answers"]:
                metrics[f"{kind}/exact_match"] = sums["exact"] / sums["answers"]
    return metrics


def _sum(parts: Iterable[dict[str, jax.Array]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
