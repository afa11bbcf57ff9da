"""Ouro's decoding: through caches what the whole pass gives, and early exits as the equations have them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.budget import memory, program
from dreamer_jax.families import build
from dreamer_jax.inference import Engine, batches, fold
from tests.families.cases import drawn_params, logits_in_flight
from tests.families.plain_ouro import PlainOuro, wide
from tests.families.test_ouro import TINY

LAST = dataclasses.replace(TINY, cache="last")
LENGTH, LOOPS = 9, TINY.depth
TOKENS = np.random.default_rng(3).integers(0, 23, LENGTH)
PROMPTS = [[1, 5, 6], [2, 7, 8, 9, 9], [4]]


def logits(config, states):
    return states @ wide(drawn_params(config))["head"].T


@functools.cache
def wanted(config, prompt=0):
    """Logits [R, S, V] of every loop, by the equations."""
    return logits(config, PlainOuro(config, wide(drawn_params(config))).row(TOKENS, LOOPS, prompt=prompt)[0])


@functools.cache
def stepping(config):
    """The model, and its step as a program."""
    model = fold(config, drawn_params(config), {})
    return model, jax.jit(lambda flight, places, depths, slots: model.step(flight, places, depths, slots))


def chunk(config, slots, start, end):
    """Positions start .. end - 1 through all loops: logits, and the slots."""
    model, step = stepping(config)
    places = jnp.arange(start, end)[None]
    flight, slots = model.enter(jnp.asarray(TOKENS[None, start:end]), places, slots)
    for t in range(LOOPS):
        flight, slots = step(flight, places, jnp.int32(t), slots)
    hidden, slots = model.leave(flight, places, slots)
    return np.asarray(model.logits(hidden)[0]), slots


def test_decodes_what_the_whole_pass_gives():
    """In chunks, one by one, and with positions at different loops in one step."""
    model, _ = stepping(TINY)
    slots, expected = model.empty_slots(1, 12), wanted(TINY)[-1]
    for start, end in ((0, 4), (4, 5), (5, 6)):
        found, slots = chunk(TINY, slots, start, end)
        np.testing.assert_allclose(found, expected[start:end], atol=1e-4)
    places = jnp.arange(6, LENGTH)[None]
    found = logits_in_flight(model, jnp.asarray(TOKENS[None, 6:]), places, slots)
    np.testing.assert_allclose(found[0], expected[6:], atol=1e-4)


def test_decodes_with_the_keys_of_the_last_loop_alone():
    """A third of the memory at three loops. The first four positions come together and see each other's loops."""
    model, _ = stepping(LAST)
    slots, expected = model.empty_slots(1, 12), wanted(LAST, prompt=4)[-1]
    for start, end in ((0, 4), *((i, i + 1) for i in range(4, LENGTH))):
        found, slots = chunk(LAST, slots, start, end)
        np.testing.assert_allclose(found, expected[start:end], atol=1e-4)
    assert float(np.abs(expected[4:] - wanted(TINY)[-1, 4:]).max()) > 0.1
    whole, part = (stepping(config)[0].empty_slots(1, 12).keys.size for config in (TINY, LAST))
    caches = [memory.caches(build(config), 12)["layers cache"] for config in (TINY, LAST)]
    assert whole == LOOPS * part and caches == [4 * whole, 4 * part]  # keys and values of two bytes


@functools.cache
def generated(config):
    """Every row's tokens and depths, of all rows in one batch."""
    engine = Engine(fold(config, drawn_params(config), {}))
    engine._most_batches = 1  # as on a chip, so that rows wait for one another
    return engine.generate(PROMPTS, 6)


@pytest.mark.slow
def test_prompts_come_in_one_piece_whatever_is_beside_them(monkeypatch):
    """Where the last loop's keys stand for all, a piece behind another sees less than it would in one."""
    monkeypatch.setattr(batches, "CHUNK_TOKENS", 64)  # pieces of 16 for four rows whose loops are apart
    engine, row = Engine(fold(LAST, drawn_params(LAST), {})), list(np.random.default_rng(5).integers(0, 23, 30))
    engine._most_batches = 1  # as on a chip; else each core would get two of the rows
    states = PlainOuro(LAST, wide(drawn_params(LAST))).row(row, LOOPS, prompt=len(row))[0]
    logs = np.asarray(jax.nn.log_softmax(logits(LAST, states)[-1]))[np.arange(29), row[1:]]
    for beside in (0, 3):
        scores = engine.score([row, *[row[:5]] * beside])[0]
        np.testing.assert_allclose(scores.logprobs, logs, atol=1e-4)
    alone = engine.generate([row], 4)[0].tokens
    assert engine.generate([row, *PROMPTS], 4)[0].tokens == alone


@pytest.mark.slow_but("loops")
@pytest.mark.parametrize("cache", ["loops", "last"])
def test_tokens_stop_when_the_gate_says_so(cache):
    """Tokens and loops of each row are those of the equations, whatever the other rows of the batch do."""
    config = dataclasses.replace(TINY, cache=cache, exit_threshold=0.7)
    taken = set()
    for prompt, row in zip(PROMPTS, generated(config), strict=True):
        # All but the newest token are seen: the prompt through all loops, then each as deep as its gate says.
        plain = PlainOuro(config, wide(drawn_params(config)))
        states, gates = plain.row(prompt + row.tokens[:-1], LOOPS, 0.7, prompt=len(prompt))
        likeliest = logits(config, states)[-1].argmax(-1)
        assert row.tokens == likeliest[len(prompt) - 1 :].tolist()
        stopped = 1 - np.cumprod(1 - gates, axis=0)[:, len(prompt) :] >= 0.7
        depths = np.where(stopped.any(0), stopped.argmax(0) + 1, LOOPS)
        assert row.depths == [LOOPS, *depths.tolist()]
        taken |= set(depths.tolist())
    assert len(taken) > 1


@pytest.mark.slow
def test_thresholds_at_both_ends():
    """q = 0 takes one loop a token, q = 1 all of them."""
    for threshold, loops in ((0.0, 1), (1.0, LOOPS)):
        rows = generated(dataclasses.replace(TINY, exit_threshold=threshold))
        assert all(row.depths == [LOOPS] + [loops] * 5 for row in rows)


@pytest.mark.parametrize("change", [{}, {"depth": 5, "layers": 1, "kv_heads": 4, "mlp_size": 20}, {"cache": "last"}])
def test_both_counters_agree(change):
    """Parameters and matrix products, by arithmetic and in the lowered program."""
    config = dataclasses.replace(TINY, **change)
    assert program.count(config, 24) == program.expected(config, 24)
