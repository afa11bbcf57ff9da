"""Cached, folded, chunked and ragged decoding against the full forward pass of training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from dreamer_jax.inference import FoldedModel, fold
from tests.model.cases import MIXINGS, VARIANTS, jitted_forward, random_tokens, random_weights, small_config

LENGTH = 11
TOLERANCE = 1e-5


@functools.cache
def model_of(variant: str, mixing: str, depth: int | None = None) -> FoldedModel:
    config = small_config(variant, mixing)
    return fold(config, *random_weights(config), depth=depth)


def full_logits(model: FoldedModel, tokens: np.ndarray) -> np.ndarray:
    """[B, S, V] of the model as it is trained: no cache, shared experts apart."""
    config = model.config
    ones = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    params, bias = random_weights(config)
    return np.asarray(jitted_forward(config)(params, bias, tokens, ones, positions, model.total_depth).logits)


@jax.jit
def advance(model: FoldedModel, tokens: jax.Array, positions: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
    """Tokens [B, P] at these positions through all depths: logits and caches."""
    state = model.embed(tokens)
    for l in range(model.total_depth):
        state, caches = model.step(state, positions, l, caches)
    return model.readout(state), caches


def chunked_logits(model: FoldedModel, tokens: np.ndarray, chunks: tuple[int, ...]) -> np.ndarray:
    caches = model.empty_caches(len(tokens), tokens.shape[1])
    parts, start = [], 0
    for size in chunks:
        positions = np.broadcast_to(np.arange(start, start + size), (len(tokens), size))
        logits, caches = advance(model, tokens[:, start : start + size], positions, caches)
        parts.append(np.asarray(logits))
        start += size
    assert start == tokens.shape[1]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_prefill_length_and_token_by_token_equal_the_full_forward(variant, mixing):
    model = model_of(variant, mixing)
    tokens = random_tokens(model.config, 1, (2, LENGTH))
    expected = full_logits(model, tokens)
    for chunks in ((LENGTH,), (1,) * LENGTH, (4, 4, 3), (3, 1, 4, 1, 1, 1)):
        assert np.abs(chunked_logits(model, tokens, chunks) - expected).max() < TOLERANCE
