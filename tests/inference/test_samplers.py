"""Speculative and lossless decoding against plain decoding, in float64: the text, its distribution, and the steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from scipy.stats import chi2

from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.inference import (
    Adaptive,
    DiffusionForcing,
    Engine,
    FoldedModel,
    Lossless,
    Sampling,
    Speculative,
    Static,
    engine,
    fold,
)
from dreamer_jax.inference.model import through_depths
from dreamer_jax.inference.programs import programs_for
from dreamer_jax.inference.samplers.contract import Asked, Choosing, Progress
from dreamer_jax.inference.samplers.speculative import Drafted, by_equality, by_threshold
from tests.families import test_huginn, test_ouro, test_recursive, test_universal
from tests.families.cases import random_weights, small_config

FAMILIES = ("dreamer", "huginn", "ouro", "recursive")
ROWS, LONGEST, NEW = 3, 8, 8
WITHOUT_SHRINKING = {"database": None, "phases": (Phase.generate,)}
"""A smaller failing case would take minutes to find."""


@pytest.fixture(scope="module", autouse=True)
def wide():
    """Float64, where a product's order decides nothing; one batch in one thread, so that each program is compiled
    once."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(engine, "_cores", lambda: 1)
        yield


def config_of(family: str, **changes):
    tiny = {"huginn": test_huginn.TINY, "ouro": test_ouro.TINY, "recursive": test_recursive.TINY}
    base = small_config("DR+DA", vocab_size=23) if family == "dreamer" else tiny[family]
    return dataclasses.replace(base, **changes)


@functools.cache
def model_of(family: str) -> FoldedModel:
    """Three or four depths; in the recursive one every depth has weights of its own."""
    if family == "dreamer":
        params, bias = random_weights(config_of(family))
        return fold(config_of(family, dtype="float64"), params, {"balancing": bias})
    tests = {"huginn": test_huginn, "ouro": test_ouro, "recursive": test_recursive}
    return fold(config_of(family, dtype="float64"), tests[family].drawn_params(config_of(family)), {})


def another(model: FoldedModel, seed: int) -> FoldedModel:
    """The same model with every parameter moved at random; no program is compiled for it."""
    rng = np.random.default_rng(seed)
    return model.replace(
        params=jax.tree.map(lambda x: (x * (1 + 0.3 * rng.normal(size=x.shape))).astype(x.dtype), model.params)
    )


PROMPTS = st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=LONGEST), min_size=ROWS, max_size=ROWS)


def spoilt(model: FoldedModel, token: int) -> FoldedModel:
    """The same model, which has NaN in the embedding of a token: where it is read no number is one any more."""
    return model.replace(params=model.params | {"embedding": model.params["embedding"].at[token].set(jnp.nan)})


@pytest.mark.slow_but("static-None", "speculative-sampling")
@pytest.mark.parametrize("sampling", [None, Sampling(0.8)])
@pytest.mark.parametrize("sampler", [Static(), Speculative(3, 2), Lossless(2)], ids=lambda its: its.name)
def test_a_row_whose_logits_are_no_numbers_fails_alone(sampler, sampling):
    """It has what was chosen before, and no token after; those beside it are what they would have been."""
    model, prompts = model_of("dreamer"), [[1, 5, 2], [1, 22, 2], [3]]
    whole = Engine(model, sampler).generate(prompts, NEW, sampling)
    bad = next(token for token in range(22) if token not in (1, 5, 2, 3, *whole[0].tokens, *whole[2].tokens[:3]))
    prompts[1][1] = bad
    found = Engine(spoilt(model, bad), sampler).generate(prompts, NEW, sampling)
    assert (found[1].finish, found[1].tokens) == ("failed", [])
    for row, wanted in ((found[0], whole[0]), (found[2], whole[2])):
        ended = [*wanted.tokens, bad].index(bad) + 1
        assert row.tokens == wanted.tokens[:ended] and row.finish == ("length" if ended > NEW else "failed")


def settings_of(kind: str, depth: int):
    """Samplers of a kind that differ in run-time numbers only."""
    depths = st.integers(1, depth - 1)
    return depths.map((lambda d: Speculative(3, d)) if kind == "speculative" else (lambda d: Lossless(d)))


def compare(data, family: str, kind: str, sampling: Sampling | None) -> tuple[int, int]:
    """A random model, prompts, stop token and setting: texts are those of plain decoding. Returns what was accepted."""
    model = another(model_of(family), data.draw(st.integers(0, 10_000), label="model"))
    prompts = data.draw(PROMPTS, label="prompts")
    sampler = data.draw(settings_of(kind, model.total_depth), label="sampler")
    stop = [data.draw(st.integers(0, 22), label="stop")]
    plain = Engine(model).generate(prompts, NEW, sampling, stop)
    found = Engine(model, sampler).generate(prompts, NEW, sampling, stop)
    assert [(row.tokens, row.finish) for row in found] == [(row.tokens, row.finish) for row in plain]
    assert all(row.accepted <= row.drafted for row in found)
    return sum(row.drafted for row in found), sum(row.accepted for row in found)


@pytest.mark.slow_but("dreamer")
@pytest.mark.parametrize(
    ("family", "kind"), [("dreamer", "speculative"), ("dreamer", "lossless"), ("huginn", "lossless")]
)
def test_the_text_is_that_of_plain_decoding(family, kind):
    """Token for token, whatever the model, the prompts, the token that ends a row, and the depth of guesses."""
    counts = []

    @settings(max_examples=5, **WITHOUT_SHRINKING)
    @given(st.data())
    def examples(data):
        counts.append(compare(data, family, kind, None))

    examples()
    drafted, accepted = np.sum(counts, axis=0)
    assert 0 < accepted < drafted  # both ways were gone


@pytest.mark.slow  # fifty examples of each of four families, and programs for drawn tokens too
@pytest.mark.parametrize("kind", ["speculative", "lossless"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_plain_decoding_in_many_cases(family, kind):
    """Also drawn with the same seed, where guesses are drawn with the keys of the tokens."""

    @settings(max_examples=50, **WITHOUT_SHRINKING)
    @given(st.data())
    def examples(data):
        drawn = kind == "lossless" and data.draw(st.booleans(), label="drawn")
        sampling = Sampling(data.draw(st.floats(0.2, 2.0)), seed=data.draw(st.integers(0, 99))) if drawn else None
        compare(data, family, kind, sampling)

    examples()


SAMPLED = Sampling(0.9, min_p=0.1, seed=5)
DRAWS, FEW = 20_000, 6


@functools.cache
def small_model():
    """A vocabulary of 6, so that pairs of tokens come often."""
    config = config_of("ouro", vocab_size=FEW, layers=1, dtype="float32")
    return fold(config, test_ouro.drawn_params(config), {})


@functools.cache
def sampled(sampler) -> np.ndarray:
    """[DRAWS, 3] tokens behind the prompt 1, 2."""
    drawn = Engine(small_model(), sampler).generate([[1, 2]] * DRAWS, 3, SAMPLED, batch_size=DRAWS)
    return np.array([row.tokens for row in drawn])


def pairs_expected(depth: int) -> np.ndarray:
    """[V, V], the probability of the second and third token behind the prompt, of passes at this depth."""
    model = small_model().replace(total_depth=depth)
    rows = np.array([[1, 2, *each] for each in itertools.product(range(FEW), repeat=2)])
    places = jnp.broadcast_to(jnp.arange(4), rows.shape)
    logits = jax.jit(lambda rows: model.logits(through_depths(model, rows, places, model.empty_slots(len(rows), 4))[0]))
    scaled = np.asarray(logits(rows), np.float64)[:, 1:] / SAMPLED.temperature
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p = np.where(p >= SAMPLED.min_p, p, 0)
    p = (p / p.sum(-1, keepdims=True)).reshape(FEW, FEW, 3, FEW)  # behind 2; behind a; behind a, b
    return np.einsum("a,ab,abc->bc", p[0, 0, 0], p[:, 0, 1], p[:, :, 2])


def statistic(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Chi-square over the cells that are to be expected at all, and its bound at a level of 0.001."""
    there = expected > 0
    assert counts[~there].sum() == 0
    wanted = counts.sum() * expected[there]
    return float(((counts[there] - wanted) ** 2 / wanted).sum()), float(chi2.isf(1e-3, there.sum() - 1))


@pytest.mark.parametrize(
    "sampler", [Speculative(2, 1), pytest.param(Lossless(1), marks=pytest.mark.slow)], ids=["speculative", "lossless"]
)
def test_drawn_tokens_have_the_distribution_of_full_depth(sampler):
    """20,000 rows; those of the drafts' depth would be told apart."""
    tokens = sampled(sampler)
    counts = np.zeros((FEW, FEW))
    np.add.at(counts, (tokens[:, 1], tokens[:, 2]), 1)
    found, bound = statistic(counts, pairs_expected(small_model().total_depth))
    assert found < bound
    shallow = pairs_expected(1)
    wanted = counts.sum() * np.maximum(shallow, 1e-9)
    assert ((counts - wanted) ** 2 / wanted).sum() > 20 * bound


@pytest.mark.slow
def test_lossless_text_is_that_of_the_seed():
    """Drawn tokens are the very same as in plain decoding, which the speculative sampler's needn't be."""
    plain, wave = (sampled(sampler) for sampler in (None, Lossless(1)))
    np.testing.assert_array_equal(wave, plain)


# Steps that follow one another, where all guesses are right.


@functools.cache
def counting(depth: int = 5) -> FoldedModel:
    """A model whose layers add nothing, so that every depth predicts the same: behind each token the next number."""
    config = dataclasses.replace(test_recursive.FORMS["plain"], tied_head=False, dtype="float64")
    params = test_recursive.drawn_params(config)
    rows = np.random.default_rng(0).normal(size=params["embedding"].shape)
    rows /= np.linalg.norm(rows, axis=-1, keepdims=True)  # so a row is most alike to itself
    layers, norm = jax.tree.map(np.zeros_like, params["layers"]), np.ones_like(params["final_norm"])
    changed = {"layers": layers, "final_norm": norm, "embedding": rows, "head": np.roll(rows, 1, axis=0)}
    return fold(config, params | changed, {}, depth)


def counted(sampler, new: int = 10, stop: int = -1) -> tuple[int, ...]:
    """Steps, work, drafted and accepted tokens of a text of so many tokens."""
    (row,) = Engine(counting(), sampler).generate([[9, 9, 2]], new, stop_ids=[stop])
    expected = list(range(3, stop if stop > 0 else 3 + new))
    assert row.tokens == expected and row.depths == [5] * len(expected)
    return row.steps, row.work, row.drafted, row.accepted


def test_steps_of_plain_decoding():
    """The first token comes of the prompt."""
    assert counted(None) == (45, 45, 0, 0)


def test_steps_of_speculative_rounds():
    """9 tokens behind the first are three rounds of three: each takes k d + L steps, in which its positions go through
    2 d and 3 L depths."""
    assert counted(Speculative(2, 1)) == (3 * 7, 3 * (2 + 15), 6, 6)
    assert counted(Speculative(2, 3)) == (3 * 11, 3 * (6 + 15), 6, 6)


def test_drafts_behind_the_end_of_a_row_have_not_stayed():
    """One token is wanted behind the first, or the first of two right drafts ends the row."""
    assert counted(Speculative(2, 1), new=2) == (7, 2 + 15, 2, 1)
    assert counted(Speculative(2, 1), stop=4) == (7, 2 + 15, 2, 1)


def test_steps_of_a_wave():
    """The first arrives after L = 5 steps, each next one e steps later; the last token behind it isn't entered. Every
    position that entered goes through all depths."""
    assert counted(Lossless(1)) == (5 + 8, 9 * 5, 8, 8)
    assert counted(Lossless(4)) == (5 + 8 * 4, 9 * 5, 8, 8)


def test_steps_of_a_small_wave():
    """One lane is plain decoding. With two, pairs fly: arrivals are at steps 5, 6, 10, 11, 15 ..."""
    assert counted(Lossless(1, 1)) == (45, 45, 0, 0)
    assert counted(Lossless(1, 2))[0] == 25
    assert counted(Lossless(1, 2), new=9)[0] == 21


def test_a_token_that_ends_the_row_is_not_entered():
    """It has no successor: of 3 .. 8 and the stop token 9, the first six enter, and with 8 the row ends."""
    assert counted(Lossless(1), stop=9) == (5 + 5, 6 * 5, 5, 5)


def test_numbers_compile_nothing_anew_and_other_rows_change_nothing():
    """In blocks of one token rows wait for one another; each comes to the same in the same number of steps."""
    model, programs = model_of("dreamer"), programs_for(None).decode
    prompts = [[1, 2, 3], [4], [5] * 7]
    plain = [row.tokens for row in Engine(model).generate(prompts, NEW)]
    for one, two in ((Speculative(3, 1), Speculative(3, 2)), (Lossless(1, 2), Lossless(2))):
        rows = Engine(model, one).generate(prompts, NEW)
        size = programs._cache_size()
        *_, in_blocks = Engine(model, one).stream(prompts, NEW, block=1)
        assert [dataclasses.astuple(row) for row in in_blocks] == [dataclasses.astuple(row) for row in rows]
        others = Engine(model, two).generate(prompts, NEW)
        assert [row.tokens for row in rows] == [row.tokens for row in others] == plain
        assert [row.steps for row in rows] != [row.steps for row in others]
        assert programs._cache_size() == size


@pytest.mark.slow  # programs of its own
def test_a_mesh_changes_nothing():
    """With depth attention, whose cache of the positions in flight is divided by rows too."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    prompts = [[1, 2, 3], [4]]
    alone, spread = (Engine(model_of("dreamer"), Lossless(1), its).generate(prompts, NEW) for its in (None, mesh))
    assert [dataclasses.astuple(row) for row in spread] == [dataclasses.astuple(row) for row in alone]


# Which drafts are kept.


def test_the_rules_of_keeping_drafts():
    """Against loops over rows and tokens."""
    rng, rows, k = np.random.default_rng(0), 40, 3
    logits = rng.normal(size=(rows, k + 1, 5)).astype(np.float32)
    drafts = np.where(rng.random((rows, k)) < 0.6, logits[:, :k].argmax(-1), rng.integers(0, 5, (rows, k)))
    where = jnp.zeros(rows, jnp.int32)
    progress = Progress(where, where, where > 0, where, where, where)
    asked = Asked(jnp.int32(1), jnp.array([-1]), Sampling().numbers(), ())
    drafted, p = Drafted(jnp.asarray(drafts, jnp.int32), ()), np.exp(logits)
    for threshold in (1.0, 0.5, 0.2):
        if threshold == 1:
            tokens, kept = by_equality(Choosing(), drafted, jnp.asarray(logits), progress, asked)
        else:
            tokens, kept = by_threshold(
                Choosing(), drafted, jnp.asarray(logits), progress, asked, jnp.float32(threshold)
            )
        for row in range(rows):
            wanted: list[int] = []
            for i in range(k):
                if p[row, i, drafts[row, i]] < threshold * p[row, i].max():
                    break
                wanted.append(drafts[row, i])
            wanted.append(logits[row, len(wanted)].argmax())
            assert kept[row] + 1 == len(wanted)
            assert tokens[row, : len(wanted)].tolist() == wanted
        assert len(np.unique(kept)) == k + 1


# What is refused.


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of("huginn", cache="compress-s2"), "compress-s2.*--cache"),
        (config_of("huginn", cache="always-last"), "always-last.*--cache"),
        (config_of("ouro", cache="last"), "cache last"),
        (config_of("ouro", exit_threshold=0.5), "rule it was trained with; take the sampler static"),
        (test_universal.TINY, "rule it was trained with; take the sampler static"),
    ],
)
def test_families_that_cannot_are_refused(config, said):
    model = FoldedModel({}, {}, build(config), 4)
    for sampler in (Speculative(), Lossless()):
        with pytest.raises(UserError, match=f"sampler {sampler.name}: .*{said}"):
            Engine(model, sampler)


def test_settings_that_are_refused():
    for sampler, said in (
        (Speculative(4, 3), "draft_depth 3: must be less than the depth of the model, 3"),
        (Lossless(3), "guess_depth 3: must be less than the depth of the model, 3"),
    ):
        with pytest.raises(UserError, match=said):
            Engine(model_of("dreamer"), sampler)
    for sampler in (Speculative(), Lossless()):
        with pytest.raises(UserError, match=f"depth 1: sampler {sampler.name} needs 2 or more"):
            Engine(model_of("huginn").replace(total_depth=1), sampler)
    for kind, changes in (
        (Speculative, {"lookahead": 0}),
        (Speculative, {"lookahead": 2**16 + 1}),
        (DiffusionForcing, {"headway": 2**31}),
        (Speculative, {"threshold": 1.5}),
        (Lossless, {"wavefront": -1}),
        (Lossless, {"guess_depth": 2.5}),
        (Adaptive, {"every": 1.5}),
        (Adaptive, {"criterion": "entropy"}),
        (DiffusionForcing, {"headway": "1"}),
        (DiffusionForcing, {"exit": "never"}),
        (DiffusionForcing, {"noise_schedule": "cosine"}),
    ):
        with pytest.raises(UserError, match=f"sampler.{next(iter(changes))} .*must be"):
            kind(**changes)
