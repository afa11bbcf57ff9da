"""Cached, folded, chunked, ragged and mixed-depth decoding against the full forward pass of training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.memory import Slots
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Engine, Flight, FoldedModel, fold
from dreamer_jax.inference import model as folding
from pallas_kernels.weights import OutputRows
from tests.families import test_huginn
from tests.families.cases import (
    MIXINGS,
    VARIANTS,
    apply,
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
    params, bias = random_weights(config)
    return fold(config, params, {"balancing": bias}, depth=depth)


def full_logits(model: FoldedModel, tokens: np.ndarray) -> np.ndarray:
    """[B, S, V] of the model as it is trained: no cache, shared experts apart."""
    config = model.config
    ones = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    params, bias = random_weights(config)
    return np.asarray(jitted_forward(config)(params, bias, tokens, ones, positions, model.total_depth).logits)


@jax.jit
def advance(model: FoldedModel, tokens: jax.Array, positions: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
    """Tokens [B, P] at these positions through all depths: logits and slots."""

    def body(l: jax.Array, carry: tuple[Flight, Slots]) -> tuple[Flight, Slots]:
        return model.step(carry[0], positions, l, carry[1])

    flight, slots = jax.lax.fori_loop(0, model.total_depth, body, model.enter(tokens, positions, slots))
    hidden, slots = model.leave(flight, positions, slots)
    return model.logits(hidden), slots


@jax.jit
def one_step(model: FoldedModel, flight: Flight, positions: Any, depths: Any, slots: Slots) -> tuple[Flight, Slots]:
    return model.step(flight, positions, depths, slots)


def select_positions(chosen: np.ndarray, new: Flight, old: Flight) -> Flight:
    """The new flight where `chosen` [B, P], else the old one."""

    def pick(flags: np.ndarray, a: Any, b: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(flags, a, b), a, b)

    of_tokens = chosen.reshape(1, -1, 1)  # [L, B P, kv d]
    return Flight(pick(chosen[..., None], new.state, old.state), old.inputs, pick(of_tokens, new.depths, old.depths))


def chunked_logits(
    model: FoldedModel, tokens: np.ndarray, chunks: list[int], capacity: int | None = None
) -> np.ndarray:
    slots = model.empty_slots(len(tokens), capacity or tokens.shape[1])
    parts, start = [], 0
    for size in chunks:
        positions = np.broadcast_to(np.arange(start, start + size), (len(tokens), size))
        logits, slots = advance(model, tokens[:, start : start + size], positions, slots)
        parts.append(np.asarray(logits))
        start += size
    assert start == tokens.shape[1]
    return np.concatenate(parts, axis=1)


@pytest.mark.slow_but("DR+DA-parallel_attention", "LA-sequential")
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


@pytest.mark.slow_but("DR+DA")
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


@pytest.mark.slow_but("DR+DA-5")
@pytest.mark.parametrize(("variant", "depth"), [("DR+DA", 5), ("DR", 2), ("LA+DA", 2)])
def test_another_depth_at_run_time_equals_the_full_forward_at_that_depth(variant, depth):
    model = model_of(variant, depth=depth)
    tokens = random_tokens(model.config, 4, (2, 4))
    params, bias = random_weights(model.config)
    output = jax.jit(functools.partial(apply, model.config, depth=depth))(params, bias, tokens)
    assert np.abs(chunked_logits(model, tokens, [3, 1]) - np.asarray(output.logits)).max() < TOLERANCE


def test_a_depth_that_layers_do_not_have_is_refused():
    with pytest.raises(UserError, match="3 layers"):
        model_of("LA", depth=4)
    with pytest.raises(UserError, match=r"sampler 'adaptive' is none; make one, .*Adaptive\(\)"):
        Engine(model_of("DR"), "adaptive")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="depth 0: must be 1 or more"):
        model_of("DR", depth=0)
    with pytest.raises(UserError, match="must be a whole number"):
        model_of("DR", depth=1.5)


@pytest.mark.slow_but("DR+DA-parallel_attention", "LA-sequential")
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_at_different_depths_in_one_batch_give_what_each_gives_alone(variant, mixing):
    """A diagonal front: position p starts p + row steps late, so that one step holds many depths."""
    model = model_of(variant, mixing)
    tokens = random_tokens(model.config, 8, (2, 4))
    positions = np.broadcast_to(np.arange(4), tokens.shape)
    outside = tokens.shape[1]  # where positions that rest in a step leave nothing

    together, slots = model.enter(jnp.asarray(tokens), positions, model.empty_slots(2, 4))
    delay = positions + np.arange(2)[:, None]
    for tick in range(model.total_depth + delay.max()):
        depths = tick - delay
        active = (depths >= 0) & (depths < model.total_depth)
        stepped, slots = one_step(
            model, together, np.where(active, positions, outside), np.clip(depths, 0, model.total_depth - 1), slots
        )
        together = select_positions(active, stepped, together)
    alone_slots = model.empty_slots(2, 4)
    for p in range(4):
        own = positions[:, p : p + 1]
        alone, alone_slots = model.enter(jnp.asarray(tokens[:, p : p + 1]), own, alone_slots)
        for l in range(model.total_depth):
            alone, alone_slots = one_step(model, alone, own, np.int32(l), alone_slots)
        assert relative_error(together.state[:, p : p + 1], alone.state) < 1e-6
    assert relative_error(slots.keys, alone_slots.keys) < 1e-6
    assert relative_error(slots.values, alone_slots.values) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["DR+DA", "LA+DA"])
def test_weights_that_are_not_arranged_for_a_cpu_equal_the_full_forward(variant, monkeypatch):
    """As elsewhere: the experts' operations of training, given the layers' weights where they lie."""
    monkeypatch.setattr("pallas_kernels.backend.on_cpu", lambda: False)
    config = small_config(variant)
    params, bias = random_weights(config)
    folding._folded.clear_cache()  # of what was compiled as for a CPU
    model = fold(config, params, {"balancing": bias})
    folding._folded.clear_cache()
    assert not any(map(is_rows, jax.tree.leaves(model.params, is_leaf=is_rows)))
    tokens = random_tokens(config, 9, (2, 6))
    expected = full_logits(model, tokens)
    assert np.abs(chunked_logits(model, tokens, [4, 1, 1]) - expected).max() < TOLERANCE
    positions = np.broadcast_to(np.arange(6), (2, 6))
    flight, slots = model.enter(jnp.asarray(tokens), positions, model.empty_slots(2, 6))
    for tick in range(model.total_depth + 5):  # position p starts p steps late: many depths in a step
        depths = tick - positions
        active = (depths >= 0) & (depths < model.total_depth)
        places, depths = np.where(active, positions, 6), np.clip(depths, 0, model.total_depth - 1)
        stepped, slots = one_step(model, flight, places, depths, slots)
        flight = select_positions(active, stepped, flight)
    hidden, _ = model.leave(flight, positions, slots)
    assert np.abs(model.logits(hidden) - expected).max() < TOLERANCE


def test_the_depth_cache_does_not_grow_with_the_sequence_and_the_sequence_cache_has_its_shape():
    model = model_of("DR+DA")
    config = model.config
    slots = model.empty_slots(2, 64)
    assert slots.keys.shape == (config.depth, 2, 64, config.sa_kv_heads, config.sa_head_size)
    zeros = jnp.zeros((2, 1), jnp.int32)
    flight, _ = model.enter(zeros, zeros, slots)
    after, _ = jax.eval_shape(model.step, flight, zeros, 0, slots)
    assert after.depths.keys.shape == flight.depths.keys.shape
    assert flight.depths.keys.shape == (config.depth, 2 * 1, config.da_kv_heads * config.da_head_size)


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    config = small_config("DR+DA", depth=2, num_experts=2)  # all experts are selected: no choice to flip
    params, bias = random_weights(config)
    tokens = random_tokens(config, 6, (2, 6))
    state = {"balancing": bias}
    exact = chunked_logits(fold(config, params, state), tokens, [6])
    half = fold(config, params, state, dtype="bfloat16")
    gate_up = half.params["layer"]["expert_attention"]["gate_up"]
    assert gate_up.matrices.dtype == jnp.uint16  # bits of bfloat16
    assert half.empty_slots(1, 1).keys.dtype == jnp.float32  # what a CPU keeps of numbers that are rounded
    found = chunked_logits(half, tokens, [5, 1])
    assert 1e-4 < relative_error(found, exact) < 0.1


@pytest.mark.slow_but("DR+DA")
@pytest.mark.parametrize("variant", ["DR+DA", "LA+DA"])
def test_experts_in_eight_bits_are_those_of_the_numbers_that_they_stand_for(variant):
    config = small_config(variant)
    params, bias = random_weights(config)
    state = {"balancing": bias}
    exact, kept = fold(config, params, state), fold(config, params, state, int8=True)
    leaves = [its for its in jax.tree.leaves(kept.params, is_leaf=is_rows) if is_rows(its) and its.scales is not None]
    assert len(leaves) == (6 if variant == "DR+DA" else 2)  # of experts and attention MoEs; LA's attention has none
    numbers = jax.tree.map(
        lambda its: its if not is_rows(its) or its.scales is None else OutputRows(its.matrices * its.scales[..., None]),
        kept.params,
        is_leaf=is_rows,
    )
    tokens = random_tokens(config, 6, (2, 6))
    found = chunked_logits(kept, tokens, [5, 1])
    assert relative_error(found, chunked_logits(kept.replace(params=numbers), tokens, [5, 1])) < 1e-5
    assert relative_error(found, chunked_logits(exact, tokens, [5, 1])) > 1e-4


@pytest.mark.slow
def test_models_without_experts_have_nothing_to_keep_in_eight_bits():
    with pytest.raises(UserError, match="int8: the model has no experts"):
        fold(test_huginn.TINY, test_huginn.drawn_params(test_huginn.TINY), {}, int8=True)


def test_eight_bits_are_refused_where_nothing_computes_with_them(monkeypatch):
    config = small_config("DR")
    params, bias = random_weights(config)
    monkeypatch.setattr("pallas_kernels.backend.on_cpu", lambda: False)
    monkeypatch.setattr(folding, "on_cpu", lambda: False)
    folding._folded.clear_cache()  # of what was compiled as for a CPU
    with pytest.raises(UserError, match="int8: that is for CPUs"):
        fold(config, params, {"balancing": bias}, int8=True)
    folding._folded.clear_cache()


def test_folding_adds_the_shared_expert_to_every_routed_one():
    config = small_config("DR+DA")
    params, bias = random_weights(config)
    folded = fold(config, params, {"balancing": bias}).params
    for name in ("sequence_attention", "depth_attention"):
        apart, together = (tree["layer"][name]["projections"] for tree in (params, folded))
        for matrix in ("qkv", "out"):
            whole = apart[matrix] + apart[f"{matrix}_shared"]
            assert f"{matrix}_shared" not in together
            assert isinstance(together[matrix], OutputRows)  # as a CPU wants it
            assert np.array_equal(together[matrix].matrices, np.swapaxes(whole, 1, 2))


@pytest.mark.slow_but("DR+DA")
@pytest.mark.parametrize("variant", ["DR+DA", "LA+DA"])
def test_folding_keeps_the_tree_and_the_precision_of_training(variant):
    """Less what is folded into the rest; every other leaf is of the compute copy's dtype, routers' queries too."""
    config = small_config(variant, dtype="bfloat16")
    params, bias = random_weights(small_config(variant))
    model = fold(config, params, {"balancing": bias})
    cast = jax.eval_shape(model.family.cast, params)
    folded = jax.tree.map(floats, model.params, is_leaf=is_rows)
    wanted = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(cast)}
    found = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(folded)}
    gone = {path for path in wanted if "_shared" in path or "keys_norm" in path}
    assert gone and found == {path: dtype for path, dtype in wanted.items() if path not in gone}


def floats(leaf: Any) -> Any:
    """A leaf of folded parameters as an array; matrices that are bits of bfloat16 in that dtype."""
    matrices = getattr(leaf, "matrices", leaf)
    return jax.lax.bitcast_convert_type(matrices, jnp.bfloat16) if matrices.dtype == jnp.uint16 else matrices


def is_rows(leaf: Any) -> bool:
    return isinstance(leaf, OutputRows)
