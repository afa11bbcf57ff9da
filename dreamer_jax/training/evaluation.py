"""Held-out loss, perplexity and exact match, and a few worked examples to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.config.schema import Config
from dreamer_jax.data import Data, Record
from dreamer_jax.model import Dreamer
from dreamer_jax.training.state import TrainState


def evaluate(evaluation_step: Callable[..., Any], place: Callable, state: TrainState, data: Data) -> dict[str, float]:
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
        sums = _sum(evaluation_step(state.params, state.balancing, place(batch)) for batch in batches)
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


def answer(config: Config, state: TrainState, data: Data, records: list[Record], limit: int = 64) -> list[str]:
    """The model's own answers to prompts, decoded greedily.

    Every new token costs a full forward pass: meant for a few short examples, not for serving.

    Args:
        records: their prompts are answered; longer ones than a row are answered with "".
        limit: most tokens of an answer.
    """
    tokenizer, length = data.tokenizer, config.data.sequence_length
    prompts = [[tokenizer.bos, *tokenizer.encode(record.prompt)] for record in records]
    tokens = np.full((len(prompts), length), tokenizer.pad, np.int32)
    ends = [len(prompt) if len(prompt) < length else 0 for prompt in prompts]
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        tokens[row, :end] = prompt[:end]
    starts, running = list(ends), [end > 0 for end in ends]

    model = Dreamer(config.model)
    variables = {"params": state.params, "balancing": {"bias": state.balancing}}

    @jax.jit
    def next_token(variables, tokens, ends) -> jax.Array:
        # Causal attention: what stands after a row's end doesn't matter.
        hidden, _ = model.apply(variables, tokens, method="trunk")
        last = hidden[jnp.arange(tokens.shape[0]), ends - 1]
        logits: Any = model.apply(variables, last, method="head")
        return jnp.argmax(logits, axis=-1)

    for _ in range(limit):
        if not any(running):
            break
        chosen = np.asarray(next_token(variables, tokens, np.array(ends, np.int32)))
        for row in range(len(prompts)):
            if not running[row]:
                continue
            running[row] = int(chosen[row]) != tokenizer.eos and ends[row] < length
            if running[row]:
                tokens[row, ends[row]] = chosen[row]
                ends[row] += 1
    return [tokenizer.decode(tokens[row, starts[row] : ends[row]].tolist()) for row in range(len(prompts))]
