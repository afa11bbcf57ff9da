"""Cached, folded, chunked, ragged and mixed-depth decoding against the full forward pass of training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.errors import UserError
from dreamer_jax.inference import FoldedModel, fold
from dreamer_jax.inference.caches import Caches, State
from dreamer_jax.inference.experts import arrange
from dreamer_jax.model import Dreamer
from tests.model.cases import (
    MIXINGS,
    VARIANTS,
    jitted_forward,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)

LENGTH = 9
TOLERANCE = 1e-5


@functools.cache
def model_of(variant: str, mixing: str = "parallel_attention", depth: int | None = None) -> FoldedModel:
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
def advance(model: FoldedModel, tokens: jax.Array, positions: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
    """Tokens [B, P] at these positions through all depths: logits and caches."""

    def body(l: jax.Array, carry: tuple[State, Caches]) -> tuple[State, Caches]:
        return model.step(carry[0], positions, l, carry[1])

    state, caches = jax.lax.fori_loop(0, model.total_depth, body, (model.embed(tokens), caches))
    return model.readout(state), caches


@jax.jit
def one_step(model: FoldedModel, state: State, positions: Any, depths: Any, caches: Caches) -> tuple[State, Caches]:
    return model.step(state, positions, depths, caches)


def select_positions(chosen: np.ndarray, new: State, old: State) -> State:
    """The new state where `chosen` [B, P], else the old one."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(chosen[..., None] if a.ndim == 3 else chosen[None, ..., None, None], a, b)

    return jax.tree.map(pick, new, old)


def chunked_logits(
    model: FoldedModel, tokens: np.ndarray, chunks: list[int], capacity: int | None = None
) -> np.ndarray:
    caches = model.empty_caches(len(tokens), capacity or tokens.shape[1])
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
def test_a_prefill_and_then_token_by_token_equals_the_full_forward(variant, mixing):
    model = model_of(variant, mixing)
    tokens = random_tokens(model.config, 1, (2, LENGTH))
    expected = full_logits(model, tokens)
    assert np.abs(expected).max() > 1
    for prefill in (6, 1):
        found = chunked_logits(model, tokens, [prefill] + [1] * (LENGTH - prefill))
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_prefill_length_and_many_chunkings_equal_the_full_forward(variant, mixing):
    model = model_of(variant, mixing)
    tokens = random_tokens(model.config, 2, (3, LENGTH))
    expected = full_logits(model, tokens)
    rng = np.random.default_rng(0)
    chunkings = [[prefill] + [1] * (LENGTH - prefill) for prefill in range(1, LENGTH + 1)]
    for _ in range(12):
        cuts = np.sort(rng.choice(np.arange(1, LENGTH), rng.integers(1, LENGTH - 1), replace=False))
        chunkings.append(np.diff([0, *cuts, LENGTH]).tolist())
    for chunks in chunkings:
        assert np.abs(chunked_logits(model, tokens, chunks) - expected).max() < TOLERANCE, chunks


@pytest.mark.parametrize("variant", ["DR+DA", "LA"])
def test_many_rows_at_once_equal_the_full_forward(variant):
    """Enough rows for each expert that they are computed in blocks."""
    model = model_of(variant)
    tokens = random_tokens(model.config, 3, (20, LENGTH))
    assert np.abs(chunked_logits(model, tokens, [8, 1]) - full_logits(model, tokens)).max() < TOLERANCE


def test_long_caches_of_which_only_a_part_is_read_equal_the_full_forward():
    """Three blocks of slots, the last one empty; chunks end within a block, at its end and past it."""
    model = model_of("DR+DA")
    tokens = random_tokens(model.config, 7, (2, 132))
    chunks = [126, 1, 1, 1, 3]
    assert np.abs(chunked_logits(model, tokens, chunks, capacity=384) - full_logits(model, tokens)).max() < TOLERANCE


@pytest.mark.parametrize(("variant", "depth"), [("DR+DA", 5), ("DR", 2), ("LA+DA", 2)])
def test_another_depth_at_run_time_equals_the_full_forward_at_that_depth(variant, depth):
    model = model_of(variant, depth=depth)
    tokens = random_tokens(model.config, 4, (2, 4))
    params, bias = random_weights(model.config)
    variables = {"params": params, "balancing": {"bias": bias}}
    output: Any = jax.jit(functools.partial(Dreamer(model.config).apply, depth=depth))(variables, tokens)
    assert np.abs(chunked_logits(model, tokens, [3, 1]) - np.asarray(output.logits)).max() < TOLERANCE


def test_a_depth_that_layers_do_not_have_is_refused():
    with pytest.raises(UserError, match="3 layers"):
        model_of("LA", depth=4)
    with pytest.raises(UserError, match="at least one"):
        model_of("DR", depth=0)


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_at_different_depths_in_one_batch_give_what_each_gives_alone(variant, mixing):
    """A diagonal front: position p starts p + row steps late, so that one step holds many depths."""
    model = model_of(variant, mixing)
    tokens = random_tokens(model.config, 5, (2, 4))
    positions = np.broadcast_to(np.arange(4), tokens.shape)
    outside = tokens.shape[1]  # where positions that rest in a step leave nothing

    together, caches = model.embed(jnp.asarray(tokens)), model.empty_caches(2, 4)
    delay = positions + np.arange(2)[:, None]
    for tick in range(model.total_depth + delay.max()):
        depths = tick - delay
        active = (depths >= 0) & (depths < model.total_depth)
        stepped, caches = one_step(
            model, together, np.where(active, positions, outside), np.clip(depths, 0, model.total_depth - 1), caches
        )
        together = select_positions(active, stepped, together)
    alone_caches = model.empty_caches(2, 4)
    for p in range(4):
        alone = model.embed(jnp.asarray(tokens[:, p : p + 1]))
        for l in range(model.total_depth):
            alone, alone_caches = one_step(model, alone, positions[:, p : p + 1], np.int32(l), alone_caches)
        assert relative_error(together.hidden[:, p : p + 1], alone.hidden) < 1e-6
    assert relative_error(caches.keys, alone_caches.keys) < 1e-6
    assert relative_error(caches.values, alone_caches.values) < 1e-6


def test_the_depth_cache_does_not_grow_with_the_sequence_and_the_sequence_cache_has_its_shape():
    model = model_of("DR+DA")
    config = model.config
    caches = model.empty_caches(2, 64)
    assert caches.keys.shape == (config.depth, 2, 64, config.sa_kv_heads, config.sa_head_size)
    state = model.embed(jnp.zeros((2, 1), jnp.int32))
    after, _ = jax.eval_shape(model.step, state, np.zeros((2, 1), np.int32), 0, caches)
    assert state.keys is not None and after.keys is not None
    assert after.keys.shape == state.keys.shape == (config.depth, 2, 1, config.da_kv_heads, config.da_head_size)


def test_bfloat16_stays_near_float32():
    config = small_config("DR+DA", depth=2, num_experts=2)  # all experts are selected: no choice to flip
    params, bias = random_weights(config)
    tokens = random_tokens(config, 6, (2, 6))
    exact = chunked_logits(fold(config, params, bias), tokens, [6])
    half = fold(config, params, bias, dtype="bfloat16")
    assert half.weights.experts.gate_up.dtype == half.empty_caches(1, 1).keys.dtype == jnp.bfloat16
    found = chunked_logits(half, tokens, [5, 1])
    assert 1e-4 < relative_error(found, exact) < 0.1


def test_folding_adds_the_shared_expert_to_every_routed_one():
    config = small_config("DR+DA")
    params, bias = random_weights(config)
    weights = fold(config, params, bias).weights
    projections = params["layer"]["sequence_attention"]["projections"]
    assert np.array_equal(weights.sequence.qkv, arrange(projections["qkv"] + projections["qkv_shared"]))
    assert np.array_equal(weights.sequence.out, arrange(projections["out"] + projections["out_shared"]))
