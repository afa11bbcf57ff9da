"""Batches of ragged prompts against the full forward pass, one row and one token at a time."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

from dreamer_jax.blocks.memory import Slots
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Adaptive, Engine, FoldedModel, Sampling, batches, engine, fold
from dreamer_jax.inference.programs import programs_for
from tests.families.cases import jitted_forward, random_weights, small_config

PROMPTS = [[1, 2, 3], [4] * 20, [5, 6], [7, 8, 9, 10, 11], [12]]
LONGEST = 48


@functools.cache
def model_of(variant: str = "DR+DA") -> FoldedModel:
    config = small_config(variant)
    params, bias = random_weights(config)
    return fold(config, params, {"balancing": bias})


def full_logits(row: list[int], variant: str = "DR+DA") -> np.ndarray:
    """[n, V] of the training model; padded, so that it is compiled once."""
    config = small_config(variant)
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(row)] = row
    positions = np.arange(LONGEST, dtype=np.int32)[None]
    forward = jitted_forward(config)
    logits = forward(*random_weights(config), tokens, np.ones_like(tokens), positions, config.depth).logits
    return np.asarray(logits)[0, : len(row)]


@functools.cache
def greedy(prompt: tuple[int, ...], count: int, variant: str) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(full_logits(row, variant)[-1].argmax()))
    return row[len(prompt) :]


@pytest.mark.slow_but("DR+DA")
@pytest.mark.parametrize("variant", ["DR+DA", "LA"])
def test_ragged_greedy_generation_is_that_of_the_full_forward(variant):
    found = Engine(model_of(variant)).generate(PROMPTS, 7)
    assert [row.tokens for row in found] == [greedy(tuple(prompt), 7, variant) for prompt in PROMPTS]
    assert {row.finish for row in found} == {"length"}
    assert all(row.depths == [3] * 7 for row in found)


def in_columns(model: FoldedModel) -> FoldedModel:
    """Its matrices column after column, as a TPU lays some."""

    def placed(leaf):
        return jax.device_put(leaf, Format(Layout(tuple(reversed(range(leaf.ndim)))), leaf.sharding))

    return model.replace(params=jax.tree.map(placed, model.params))


@pytest.mark.slow
def test_weights_lie_row_after_row():
    """Programs would copy them first."""
    given = in_columns(model_of())
    matrices = [leaf for leaf in jax.tree.leaves(given.params) if leaf.ndim > 1]
    assert all(leaf.format.layout.major_to_minor[-1] == 0 for leaf in matrices)
    its = Engine(given)
    for leaf, own in zip(jax.tree.leaves(its.model.params), jax.tree.leaves(model_of().params), strict=True):
        assert leaf.format.layout.major_to_minor == tuple(range(leaf.ndim))
        np.testing.assert_array_equal(leaf, own)
    assert its.generate(PROMPTS[:2], 3)[0].tokens == greedy(tuple(PROMPTS[0]), 3, "DR+DA")


def test_batches_and_chunks_of_the_prompts_change_nothing(monkeypatch):
    expected = [greedy(tuple(prompt), 5, "DR+DA") for prompt in PROMPTS]
    monkeypatch.setattr(batches, "CHUNK_TOKENS", 16)  # the prompt of 20 in two chunks
    found = Engine(model_of()).generate(PROMPTS, 5, batch_size=2)
    assert [row.tokens for row in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize("cores", [3, 1])
def test_parts_of_a_batch_in_threads_change_nothing(monkeypatch, cores):
    monkeypatch.setattr(engine, "_cores", lambda: cores)
    threads = set()
    advance = batches.RowBatch.advance

    def noted(part: batches.RowBatch, block: int) -> None:
        threads.add(threading.get_ident())
        advance(part, block)

    monkeypatch.setattr(batches.RowBatch, "advance", noted)
    found = Engine(model_of()).generate(PROMPTS, 5)
    assert [row.tokens for row in found] == [greedy(tuple(prompt), 5, "DR+DA") for prompt in PROMPTS]
    assert (threads == {threading.get_ident()}) == (cores == 1)
    for row, scores in zip(PROMPTS, Engine(model_of()).score(PROMPTS), strict=True):
        assert scores.greedy.tolist() == (full_logits(row)[:-1].argmax(axis=-1) == row[1:]).tolist()


def test_a_row_ends_at_its_stop_token_which_is_left_out():
    expected = greedy((1, 2, 3), 7, "DR+DA")
    stop = next(token for token in expected if token != expected[0])
    at = expected.index(stop)
    found = Engine(model_of()).generate([[1, 2, 3], [5, 6]], 7, stop_ids=[stop])
    assert found[0].tokens == expected[:at] and found[0].finish == "stop"
    other = greedy((5, 6), 7, "DR+DA")
    assert found[1].tokens == (other[: other.index(stop)] if stop in other else other)
    first = Engine(model_of()).generate([[1, 2, 3]], 7, stop_ids=[expected[0]])[0]
    assert first.tokens == [] and first.finish == "stop"


def test_a_row_ends_when_it_is_said_to_be_finished():
    asked = []

    def finished(row: int, tokens: list[int]) -> bool:
        asked.append((row, len(tokens)))
        return row == 1 and len(tokens) >= 3

    rows = [[1, 2, 3], [5, 6]]
    *_, found = Engine(model_of()).stream(rows, 9, finished=finished, block=2)
    assert found[0].tokens == greedy((1, 2, 3), 9, "DR+DA") and found[0].finish == "length"
    assert found[1].tokens == greedy((5, 6), 3, "DR+DA") and found[1].finish == "stop"
    assert asked[:4] == [(0, 1), (1, 1), (0, 3), (1, 3)]


def test_a_single_token_can_be_asked_for():
    assert Engine(model_of()).generate([[1, 2, 3]], 1)[0].tokens == greedy((1, 2, 3), 1, "DR+DA")


def test_nothing_is_compiled_again_while_texts_of_a_bucket_grow():
    programs = programs_for(None)
    small = Engine(model_of())
    small.generate([[1] * 3, [2] * 9], 20)
    sizes = [program._cache_size() for program in (programs.prefill, programs.first, programs.decode)]
    # All with prompts of up to 16 tokens and caches for 25 to 32: one bucket.
    for prompts, tokens in (([[3] * 16, [4]], 12), ([[3], [5] * 12], 20), ([[1] * 14, [4]], 11)):
        for block in (1, 7, 32):
            list(small.stream(prompts, tokens, block=block))
    small.generate([[1] * 3, [2] * 9], 20, Sampling(temperature=0.0, seed=4))
    assert [program._cache_size() for program in (programs.prefill, programs.first, programs.decode)] == sizes
    drawn = [Sampling(0.7, 5, 0.9, 0.1, 1), Sampling(1.3, 3, 0.5, 0.0, 2)]
    small.generate([[1] * 3, [2] * 9], 20, drawn[0])
    sizes = programs.decode._cache_size()
    small.generate([[1] * 3, [2] * 9], 20, drawn[1])
    assert programs.decode._cache_size() == sizes


def test_draws_are_the_same_in_any_batch():
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=7)
    drawing = Engine(model_of())
    together = drawing.generate(PROMPTS, 6, sampling)
    alone = [drawing.generate([prompt], 6, sampling, numbers=[i])[0] for i, prompt in enumerate(PROMPTS)]
    assert [row.tokens for row in together] == [row.tokens for row in alone]
    assert [row.tokens for row in together] != [greedy(tuple(prompt), 6, "DR+DA") for prompt in PROMPTS]


def test_scores_are_the_log_probabilities_of_the_full_forward(monkeypatch):
    monkeypatch.setattr(batches, "CHUNK_TOKENS", 32)  # chunks of 16 and fewer rows at once
    rows = [*PROMPTS, list(np.random.default_rng(0).integers(0, 23, 40))]
    for row, scores in zip(rows, Engine(model_of()).score(rows, batch_size=2), strict=True):
        logits = full_logits(row)[:-1]
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(row) - 1), row[1:]]
        assert scores.logprobs.shape == (len(row) - 1,)
        assert np.abs(scores.logprobs - expected).max(initial=0) < 1e-5
        assert scores.greedy.tolist() == (logits.argmax(axis=-1) == row[1:]).tolist()


EXPERTS_TOO = {"slice": 2, "data0": 2, "expert": 2}


@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        ("DR+DA", EXPERTS_TOO),
        pytest.param("DR+DA", {"data": 4}, marks=pytest.mark.slow),
        pytest.param("LA", EXPERTS_TOO, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing(variant, shape):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    count = int(np.prod(list(shape.values())))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(tuple(shape.values())), tuple(shape))
    spread = Engine(model_of(variant), mesh=mesh)
    found = spread.generate(PROMPTS, 4)
    assert [row.tokens for row in found] == [greedy(tuple(prompt), 4, variant) for prompt in PROMPTS]
    gate_up = spread.model.params["layers" if variant == "LA" else "layer"]["expert_attention"]["gate_up"].matrices
    assert gate_up.addressable_shards[0].data.size == gate_up.size // shape.get("expert", 1)
    alone, scores = Engine(model_of(variant)).score(PROMPTS), spread.score(PROMPTS)
    for a, b in zip(alone, scores, strict=True):
        assert np.abs(a.logprobs - b.logprobs).max(initial=0) < 1e-5


@pytest.mark.slow
def test_devices_divide_experts_in_eight_bits():
    """With the scales of their own."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    config = small_config("DR+DA")
    params, bias = random_weights(config)
    model = fold(config, params, {"balancing": bias}, int8=True)
    spread = Engine(model, mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "expert")))
    scales = spread.model.params["layer"]["expert_attention"]["gate_up"].scales
    assert scales.addressable_shards[0].data.size == scales.size // 2
    for a, b in zip(Engine(model).score(PROMPTS), spread.score(PROMPTS), strict=True):
        assert np.abs(a.logprobs - b.logprobs).max(initial=0) < 1e-5


def test_early_exit_takes_all_depths_when_nothing_settles_and_one_when_everything_does():
    full = Engine(model_of()).generate(PROMPTS, 5)
    never = Engine(model_of(), sampler=Adaptive(threshold=1e-9)).generate(PROMPTS, 5)
    assert [row.tokens for row in never] == [row.tokens for row in full]
    assert all(row.depths == [3] * 5 for row in never)
    always = Engine(model_of(), sampler=Adaptive(threshold=1e9)).generate(PROMPTS, 5)
    assert all(row.depths == [3, 1, 1, 1, 1] for row in always)


@pytest.mark.slow
def test_early_exit_does_not_depend_on_the_batch():
    exiting = Engine(model_of(), sampler=Adaptive(threshold=1.0))
    together = exiting.generate(PROMPTS, 12)
    depths = [depth for row in together for depth in row.depths[1:]]
    assert 0 < sum(depth < 3 for depth in depths) < len(depths)  # the distance tells them apart
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = exiting.generate([prompt], 12)[0]
        assert (alone.tokens, alone.depths) == (row.tokens, row.depths)


def test_early_exit_needs_one_layer_for_all_depths_and_a_distance():
    with pytest.raises(UserError, match="early exit needs the same weights at every depth, or keys"):
        Engine(model_of("LA"), sampler=Adaptive(threshold=0.1))
    with pytest.raises(UserError, match=r"sampler\.criterion foo: must be one of latent-diff, "):
        Adaptive("foo")
    with pytest.raises(UserError, match="must be from 0"):
        Adaptive(threshold=-1.0)


def test_deeper_slots_get_what_was_last_computed():
    keys = jnp.arange(3 * 2 * 4, dtype=jnp.float32).reshape(3, 2, 4, 1, 1)
    filled = Slots(keys, -keys).fill_deeper(jnp.array([0, 1]), jnp.array([2, 3]))
    expected = np.array(keys)
    expected[1:, 0, 2] = expected[0, 0, 2]
    expected[2, 1, 3] = expected[1, 1, 3]
    assert np.array_equal(filled.keys, expected) and np.array_equal(filled.values, -expected)


@pytest.mark.parametrize(
    ("prompts", "tokens", "message"), [([[]], 3, "empty"), ([[1], [99]], 3, "row 1.*vocabulary"), ([[1]], 0, "max_tok")]
)
def test_impossible_requests_are_refused(prompts, tokens, message):
    with pytest.raises(UserError, match=message):
        Engine(model_of()).generate(prompts, tokens)


def test_nothing_to_continue():
    engine = Engine(model_of())
    assert engine.generate([], 4) == engine.score([]) == list(engine.stream([], 4)) == []
