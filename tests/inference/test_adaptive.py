"""Criteria of early exit against plain NumPy, and the depths at which tokens stop."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.errors import UserError
from dreamer_jax.inference import SAMPLERS, Adaptive, Engine, fold
from dreamer_jax.inference.samplers.adaptive import rule
from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.samplers.one_by_one import until_stopped
from tests.families.test_huginn import TINY, drawn_params

DEPTH, ROWS, VOCABULARY = 9, 3, 32
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, 1))


@functools.cache
def model():
    return fold(TINY, drawn_params(TINY), {}, DEPTH)


@functools.cache
def alone():
    """Streams and logits of single tokens."""
    its = model()

    @jax.jit
    def run(tokens):
        places, slots = jnp.zeros((ROWS, 1), jnp.int32), its.empty_slots(ROWS, 1)
        flight, slots = its.enter(tokens, places, slots)
        streams, logits = [flight.state[:, 0]], []
        for depth in range(DEPTH):
            flight, slots = its.step(flight, places, depth, slots)
            streams.append(flight.state[:, 0])
            logits.append(its.logits(its.leave(flight, places, slots)[0])[:, 0])
        return jnp.stack(streams), jnp.stack(logits)

    return [np.asarray(each, np.float64) for each in run(TOKENS)]


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def plain_values(criterion, checks):
    """The value of every check [checks, ROWS], by the definitions, of checks at these depths."""
    streams, logits = alone()
    s = [streams[0], *(streams[depth] for depth in checks)]
    p = softmax(np.stack([logits[depth - 1] for depth in checks]))
    uniform = np.full((1, ROWS, VOCABULARY), 1 / VOCABULARY)
    if criterion == "latent-diff":
        return np.array([np.linalg.norm(b - a, axis=-1) / np.linalg.norm(b, axis=-1) for a, b in itertools.pairwise(s)])
    if criterion == "cosine":
        return np.array(
            [
                1 - (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
                for a, b in itertools.pairwise(s)
            ]
        )
    if criterion == "entropy-diff":
        h = [np.full(ROWS, 100.0), *(-(p * np.log(p)).sum(-1))]
        return np.abs(np.diff(h, axis=0))
    if criterion == "argmax-stability":
        counts, token = [np.zeros(ROWS)], p[0].argmax(-1)
        for each in p[1:].argmax(-1):
            counts.append(np.where(each == token, counts[-1] + 1, 0))
            token = each
        return np.array(counts)
    if criterion == "minp-kl":
        p = np.where(p < 0.1 * p.max(-1, keepdims=True), 1 / VOCABULARY, p)
        p = p / p.sum(-1, keepdims=True)
    p = np.concatenate([uniform, p])
    return (p[:-1] * (np.log(p[:-1]) - np.log(p[1:]))).sum(-1)


@functools.cache
def stopping(criterion):
    """(threshold, least, every) -> depths of single tokens, jitted."""

    @jax.jit
    def run(tokens, *numbers):
        places, slots = jnp.zeros((ROWS, 1), jnp.int32), model().empty_slots(ROWS, 1)
        return until_stopped(model(), tokens, places, slots, rule(criterion, *numbers))[2]

    return lambda *numbers: np.asarray(run(TOKENS, *map(jnp.float32, numbers[:1]), *map(jnp.int32, numbers[1:])))


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("least", "every"), [(1, 1), (3, 2)])
def test_a_token_stops_where_the_definition_says(criterion, least, every):
    """At thresholds between any two values that come up, and with checks that aren't made at every depth."""
    checks = list(range(least, DEPTH + 1, every))
    values, rises = plain_values(criterion, checks), criterion == "argmax-stability"
    assert values.shape == (len(checks), ROWS)
    between = np.sort(values.ravel())
    thresholds = (between[1:] + between[:-1])[np.diff(between) > 1e-4 * between.max()] / 2
    assert len(thresholds) >= (1 if rises else 6)
    seen = set()
    for threshold in thresholds[:: max(1, len(thresholds) // 6)]:
        stops = values >= threshold if rises else values < threshold
        wanted = np.where(stops.any(0), np.array(checks)[stops.argmax(0)], DEPTH)
        np.testing.assert_array_equal(stopping(criterion)(threshold, least, every), wanted)
        seen |= set(wanted.tolist())
    assert len(seen) > 1 and min(seen) >= least


def test_stability_counts_what_stays_the_same():
    """6 equal predictions are 5 times the same as before: the published threshold."""
    its, counts = CRITERIA["argmax-stability"], []
    seen = its.start(jnp.zeros((1, 4)), 5)
    for token in [3, 3, 3, 0, 2, 2, 2, 2, 2, 2]:
        value, seen = its.compare(seen, jax.nn.one_hot(jnp.array([token]), 5))
        counts.append(int(value[0]))
    assert counts == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    assert its.stops(jnp.float32(5), its.threshold) and not its.stops(jnp.float32(4), its.threshold)


def test_every_criterion_has_the_threshold_of_the_published_code():
    published = {"latent-diff": 0.03, "cosine": 1e-3, "entropy-diff": 1e-3, "kl": 1e-3, "minp-kl": 1e-5}
    assert {name: its.threshold for name, its in CRITERIA.items()} == published | {"argmax-stability": 5}
    for name in CRITERIA:
        chosen = Adaptive(criterion=name).numbers()[0]
        assert chosen == np.float32(CRITERIA[name].threshold) and Adaptive(name, 0.5).numbers()[0] == 0.5


def test_the_engine_compiles_once_for_all_numbers_of_a_criterion():
    """Thresholds, the least depth and the checks are run-time numbers; prompts go through all depths."""
    from dreamer_jax.inference.programs import programs_for

    def depths(**settings):
        rows = Engine(model(), Adaptive("kl", **settings)).generate([[1, 2, 3], [4]], 5)
        return np.array([row.depths for row in rows]), [(row.steps, row.work) for row in rows]

    taken, counted = depths(threshold=1e9)
    assert (taken == [DEPTH, 1, 1, 1, 1]).all() and counted == [(4, 4)] * 2
    programs = programs_for(None).decode._cache_size()
    taken, counted = depths(threshold=1e9, min_depth=4)
    assert (taken == [DEPTH, 4, 4, 4, 4]).all() and counted == [(16, 16)] * 2
    taken, counted = depths(threshold=1e-30, every=3)
    assert (taken == DEPTH).all() and counted == [(4 * DEPTH, 4 * DEPTH)] * 2
    assert programs_for(None).decode._cache_size() == programs


def test_settings_that_are_refused():
    for settings, said in (
        ({"threshold": -1.0}, "threshold"),
        ({"min_depth": 0}, "min_depth"),
        ({"every": 0}, "every"),
    ):
        with pytest.raises(UserError, match=f"sampler.{said} .*must be"):
            Adaptive(**settings)


def test_names_of_the_command_line_are_those_of_the_samplers():
    from dreamer_jax.cli.sampler_options import NAMES

    assert tuple(SAMPLERS) == NAMES
