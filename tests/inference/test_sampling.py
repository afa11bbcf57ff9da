"""What the filters keep, against their definitions one token at a time, and the frequencies of draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamer_jax.errors import UserError
from dreamer_jax.inference import Sampling
from dreamer_jax.inference.sampling import BROKEN, choose, keep

SIZE = 12


def kept_by_definition(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """Top-k, then top-p among those, then min-p: in plain Python."""
    left = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.top_k:
        left = left[: sampling.top_k]
    weights = np.exp(logits[left].astype(np.float64) - logits.max())
    share, nucleus = 0.0, []
    for token, probability in zip(left, weights / weights.sum(), strict=True):
        if share < sampling.top_p:
            nucleus.append(token)
        share += probability
    largest = np.exp(logits.astype(np.float64)).max()
    return {token for token in nucleus if np.exp(float(logits[token])) >= sampling.min_p * largest * (1 - 1e-9)}


@jax.jit
def kept(logits, numbers):
    return keep(logits, numbers, True)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(0, SIZE + 2),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_filters_keep_what_their_definitions_keep(seed, top_k, top_p, min_p):
    """At several positions of a row, as drafts are verified."""
    positions = np.random.default_rng(seed).normal(size=(3, SIZE)).astype(np.float32) * 2
    sampling = Sampling(1.0, top_k, top_p, min_p)
    for found, logits in zip(np.asarray(kept(positions[None], sampling.numbers()))[0], positions, strict=True):
        assert set(np.flatnonzero(found > -np.inf).tolist()) == kept_by_definition(logits, sampling)
        assert np.array_equal(found[found > -np.inf], logits[found > -np.inf])


def test_a_row_without_filters_loses_nothing_where_another_has_some():
    """Rows that are ranked together: the first one wants all tokens, also those behind a sum that is rounded to 1."""
    logits = jnp.array([[0.0, -20.0, -40.0, -60.0]] * 2)
    numbers = Sampling(1.0).numbers()._replace(top_p=jnp.array([1.0, 0.9]), top_k=jnp.array([0.0, 0.0]))
    assert (np.asarray(kept(logits, numbers)) > -np.inf).tolist() == [[True] * 4, [True, False, False, False]]


def test_draws_have_the_frequencies_of_the_distribution_at_the_temperature():
    count, logits = 20_000, np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    rows = jnp.arange(count)
    numbers = Sampling(temperature=2.0, seed=3).numbers()
    many = jnp.broadcast_to(logits, (count, 4))
    drawn = np.asarray(choose(many, numbers, rows, jnp.zeros(count, jnp.int32), True, False))
    expected = np.exp(logits / 2) / np.exp(logits / 2).sum()
    found = np.bincount(drawn, minlength=4) / count
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / count)


def test_a_draw_depends_on_seed_row_and_position_only():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)), jnp.float32)
    rows, positions = jnp.array([4, 4, 4, 9, 9, 4]), jnp.array([1, 1, 2, 1, 2, 1])
    same = jnp.broadcast_to(logits[:1] * 0, logits.shape)
    numbers = Sampling(temperature=1.0, seed=1).numbers()
    drawn = np.asarray(choose(same, numbers, rows, positions, True, False))
    assert drawn[0] == drawn[1] == drawn[5]
    assert len({*drawn[[0, 2, 3, 4]].tolist()}) > 2
    other = np.asarray(choose(same, Sampling(temperature=1.0, seed=2).numbers(), rows, positions, True, False))
    assert (other != drawn).any()


@pytest.mark.parametrize("ranks", [False, True])
def test_temperatures_next_to_zero_take_the_likeliest(ranks):
    """Logits divided by them would all be infinite."""
    numbers = Sampling(1e-38, top_p=0.9 if ranks else 1.0).numbers()
    logits, first = jnp.array([[4.0, 9.0, 6.0, -3.0]]), jnp.zeros(1, jnp.int32)
    assert choose(logits, numbers, first, first, True, ranks).tolist() == [1]


@pytest.mark.parametrize("top_p", [1e-30, 1e-50])  # the second one is 0 in float32
def test_a_top_p_next_to_zero_takes_the_likeliest(top_p):
    logits, first = jnp.array([[4.0, 9.0, 6.0, -3.0]]), jnp.zeros(1, jnp.int32)
    assert choose(logits, Sampling(1.0, top_p=top_p).numbers(), first, first, True, True).tolist() == [1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)])
def test_nothing_is_chosen_from_what_is_no_distribution(sampling):
    """One NaN is enough, or one logit that is infinitely large; tokens may be impossible, but not all."""
    logits = np.tile(np.arange(5, dtype=np.float32), (6, 1))
    logits[1, 0], logits[2], logits[3, 1], logits[4], logits[5, 2] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    ranks = sampling.top_p < 1
    found = choose(jnp.asarray(logits), sampling.numbers(), jnp.arange(6), jnp.arange(6), sampling.draws, ranks)
    assert [token == BROKEN for token in found.tolist()] == [False, True, True, True, True, False]


def test_temperature_zero_takes_the_likeliest():
    logits = jnp.asarray([[0.0, 3.0, 1.0]])
    assert choose(logits, Sampling(seed=5).numbers(), jnp.zeros(1), jnp.zeros(1), False, False).tolist() == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.0}, "seed 1.0: must be a whole number"),
        ({"top_k": 2.5}, "top_k 2.5: must be a whole number"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Sampling(**wrong)
