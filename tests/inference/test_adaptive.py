"""Criteria of early exit against plain NumPy, and the depths at which tokens stop."""

from __future__ import annotations

import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.errors import UserError
from dreamer_jax.inference import SAMPLERS, Adaptive, Engine, fold
from dreamer_jax.inference.batches import RowBatch
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Kinds, programs_for
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.sampling import Sampling
from tests.families.cases import until_stopped
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

    places, slots = jnp.zeros((ROWS, 1), jnp.int32), model().empty_slots(ROWS, 1)

    def run(threshold, *depths):
        numbers = jnp.float32(threshold), *map(jnp.int32, depths)
        return np.asarray(until_stopped(model(), TOKENS, places, slots, criterion, *numbers)[2])

    return run


@pytest.mark.slow_but("latent-diff", "minp-kl", "argmax-stability")
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


PROMPTS = [[1, 2, 3], [4], [7, 8]]


@functools.cache
def engine(threshold=0.7):
    return Engine(model(), Adaptive(threshold=threshold))


class CountedModel(FoldedModel):
    """A model that says when it steps."""

    counter: list = flax.struct.field(pytree_node=False)

    def step(self, *arguments):
        jax.debug.callback(lambda: self.counter.append(1), ordered=True)
        return super().step(*arguments)


class Counter(list):
    """Hashed as itself: a program belongs to one counter."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_rows_do_not_wait_for_each_other():
    """A block of a batch takes as many steps as its slowest row alone, and not the deepest of every token; texts and
    depths are those of the rows alone."""
    alone = [engine().generate([prompt], 9)[0] for prompt in PROMPTS]
    settings, counter = (9, Sampling(), (), engine().sampler), Counter()
    batch = RowBatch(model(), programs_for(None), PROMPTS, [0] * 3, 3, *settings)
    batch.begin()
    its = model()
    batch.decode_with(CountedModel(its.params, its.state, its.family, its.total_depth, counter))
    batch.advance(32)
    jax.effects_barrier()
    assert [(row.tokens, row.depths) for row in batch.rows] == [(row.tokens, row.depths) for row in alone]
    depths = np.array([row.depths[1:] for row in alone])
    slowest = depths.sum(1).max()
    assert len(counter) == slowest < depths.max(0).sum()
    assert [row.steps for row in batch.rows] == depths.sum(1).tolist()


def blocks(sampling, rounds, collect=0.0, threshold=0.7, logprobs=None):
    """Texts of the prompts in blocks of so many rounds, whatever is on its way at their ends; and blocks taken."""
    sampler = Adaptive(threshold=threshold)
    batch = RowBatch(model(), programs_for(None), PROMPTS, [0] * 3, 3, 9, sampling, (), sampler)
    batch.begin()
    kinds = Kinds(Choosing(sampling.draws, sampling.ranks, logprobs), sampler.program)
    texts, logs, count = [row.tokens[:] for row in batch.rows], [], 0
    while not batch.done:
        asked = batch._asked(32)._replace(rounds=jnp.int32(rounds), collect=jnp.float32(collect))
        block = programs_for(None).decode(kinds, model(), batch._progress, batch._slots, batch._carried, asked)
        batch._progress, batch._slots, batch._carried = block.progress, block.slots, block.carried
        for text, new in zip(texts, block.tokens.tolist(), strict=True):
            text += [token for token in new if token >= 0]
        logs.append(block.logprobs)
        count += 1
    return texts, count, logs


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)])
def test_a_block_may_end_anywhere(sampling):
    """Positions go on from the depth that they had come to, also where heads are applied to several rows at once."""
    whole = [row.tokens for row in engine().generate(PROMPTS, 9, sampling, numbers=[0] * 3)]
    found, one = zip(*(blocks(sampling, *rounds)[:2] for rounds in ((1000, 0), (3, 0), (3, 1))), strict=True)
    assert all(texts == whole for texts in found) and one[0] == 1 < one[1] <= one[2]


def test_logarithms_of_probabilities():
    """Of greedy tokens the chosen one is the likeliest; probabilities of the whole vocabulary add up to 1."""
    texts, _, (logs,) = blocks(Sampling(), 1000, logprobs=VOCABULARY)
    for row, text in enumerate(texts):
        assert logs.ids[row, :8, 0].tolist() == text[1:]
        np.testing.assert_array_equal(logs.values[row, :8, 0], logs.chosen[row, :8])
        np.testing.assert_allclose(np.exp(logs.values[row, :8]).sum(-1), 1, atol=1e-5)
        assert (np.diff(logs.values[row, :8]) <= 0).all()


def test_settings_that_are_refused():
    for settings, said in (
        ({"threshold": -1.0}, "threshold"),
        ({"min_depth": 0}, "min_depth"),
        ({"every": 0}, "every"),
        ({"every": 2**31}, "every"),
        ({"min_depth": 2**31}, "min_depth"),
    ):
        with pytest.raises(UserError, match=f"sampler.{said} .*must be"):
            Adaptive(**settings)


def test_names_of_the_command_line_are_those_of_the_samplers():
    from dreamer_jax.cli.sampler_options import NAMES

    assert tuple(SAMPLERS) == NAMES
