"""When diffusion forcing lets tokens go: counted by hand, as the published code did it; and what it refuses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.inference import DiffusionForcing, Engine, FoldedModel, engine, fold
from tests.families import test_algoformer, test_huginn, test_ouro, test_universal
from tests.outside import official_outputs


@pytest.fixture(scope="module", autouse=True)
def wide():
    """Float64, and one batch in one thread, so that each program is compiled once."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(engine, "_cores", lambda: 1)
        yield


# When tokens come, in a model that can be computed by hand.


@functools.cache
def halving(depth: int = 8) -> FoldedModel:
    """s' = (s + e) / 2 from 0, so after t recurrences s = (1 - 1/2^t) e, whose change of the last one is 1 / (2^t - 1)
    of its norm: 1, 1/3, 1/7, 1/15, 1/31. Layers add nothing, and behind each token the next number is predicted."""
    config = dataclasses.replace(
        test_huginn.FORMS["llama"], prelude_layers=0, core_layers=1, coda_layers=0, state_std=1e-30, dtype="float64"
    )
    params = jax.tree.map(lambda x: np.zeros_like(x, np.float64), test_huginn.drawn_params(config))
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0][:, :16]
    rows /= np.linalg.norm(rows, axis=-1, keepdims=True)  # so a row is most alike to itself
    half = np.eye(16) / 2
    changed = {
        "adapter": np.concatenate([half, half]),
        "final_norm": np.ones(16),
        "embedding": rows,
        "head": np.roll(rows, 1, axis=0),
    }
    return fold(config, params | changed, {}, depth)


def arrivals(sampler, tokens: int = 7, model: FoldedModel | None = None, prompt=(9, 9, 2)) -> dict[int, int]:
    """Iteration -> tokens by then, of those after which there are more."""
    found = {}
    for (row,) in Engine(model or halving(), sampler).stream([list(prompt)], tokens, block=1):
        found[row.steps // sampler.inner_recurrences] = len(row.tokens)
    if model is None:
        assert row.tokens == list(range(3, 3 + tokens))
    return found


TENTH = DiffusionForcing(1, 8, threshold=0.1)
"""States settle in the fourth recurrence: 1/7 is more, 1/15 less."""


def test_iterations_of_the_algorithm():
    """The first token comes of the prompt. Then positions leave after their fourth iteration; one enters in each."""
    assert arrivals(TENTH) == {0: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 6, 9: 7}
    assert arrivals(dataclasses.replace(TENTH, threshold=0.2)) == {0: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7}


def test_iterations_of_a_small_wavefront():
    """Two positions leave, one after the other, before the next two enter: at 4, 5, 8, 9, 12, 13."""
    assert arrivals(dataclasses.replace(TENTH, wavefront=2)) == {0: 1, 4: 2, 5: 3, 8: 4, 9: 5, 12: 6, 13: 7}


def test_the_oldest_position_leaves_after_all_recurrences():
    """Nothing settles, so it takes as many steps as one after the other; those behind aren't used."""
    never = dataclasses.replace(TENTH, threshold=1e-9)
    assert arrivals(never, 4) == {0: 1, 8: 2, 16: 3, 24: 4}


def test_iterations_without_prefill():
    """The positions of the prompt settle together, and those behind as ever."""
    assert arrivals(dataclasses.replace(TENTH, prefill=False), 4) == {0: 0, 4: 1, 5: 2, 6: 3, 7: 4}


def test_iterations_of_stable_tokens():
    """L / r' = 4. After 4 iterations the oldest has had all; the second's prediction has stayed the same 5 times in its
    sixth iteration, the wave's seventh."""
    assert arrivals(DiffusionForcing(2, 8, exit="token-stability"), 4) == {0: 1, 4: 2, 7: 3, 8: 4}


def test_an_end_of_text_ends_the_row_at_once():
    """Of 3 .. 8 the row ends with 6: what flies behind it is given up."""
    (row,) = Engine(halving(), TENTH).generate([[9, 9, 2]], 7, stop_ids=[6])
    assert row.tokens == [3, 4, 5] and row.finish == "stop" and row.steps == 6


def quirky(exit, **settings):
    return DiffusionForcing(exit=exit, noise_schedule="harmonic", official_quirks=True, **settings)


@pytest.mark.slow
def test_iterations_of_the_published_code():
    """By hand, with the numbers of iterations that positions have had.

    latent-diff, r' = 1: the first has settled in iteration 4, so nothing leaves; in 5 the second has, and the first
    leaves. In 6 states are compared with those of the next position. In 7 the four oldest positions have had 6, 5, 4
    and 3 more, so the third has settled, and two leave; and so on. fixed: L / r' + 2 = 6 iterations. token-stability:
    in iteration 6 the token of the second position has stayed the same 5 times.
    """
    latent = quirky("latent-diff", inner_recurrences=1, threshold=0.1, wavefront=8)
    assert arrivals(latent) == {0: 1, 5: 2, 7: 4, 9: 6, 11: 7}
    (row,) = Engine(halving(), latent).generate([[9, 9, 2]], 6)
    assert row.depths == [8, 8 + 5, 6, 5, 6, 5]  # the first position's counter starts with the prompt's
    for exit in ("fixed", "token-stability"):
        sampler = quirky(exit, inner_recurrences=2, wavefront=8)
        assert arrivals(sampler, 4) == {0: 1, 6: 2, 7: 3, 8: 4}
        assert Engine(halving(), sampler).generate([[9, 9, 2]], 4)[0].depths == [8, 8 + 12, 12, 12]


OFFICIAL = {
    "latent-diff": (
        {"threshold": 0.15, "momentum": 0.1, "noise": 0.2},
        [278, 389, 78, 260, 217, 423, 31, 45, 454, 510],
        [8, 16, 10, 12, 14, 16, 18, 20, 22, 20],
        {0: 1, 4: 2, 6: 3, 8: 4, 10: 5, 12: 6, 14: 7, 16: 8, 18: 10},
    ),
    "token-stability": (
        {"momentum": 0.3, "noise": 0.5, "continuous": True},
        [278, 389, 78, 260, 217, 423, 31, 45, 454, 510],
        [8, 20, 14, 16, 16, 20, 26, 26, 28, 30],
        {0: 1, 6: 2, 8: 3, 10: 4, 11: 5, 14: 6, 18: 7, 19: 8, 21: 9, 23: 10},
    ),
    "fixed": (
        {"momentum": 0.3, "noise": 0.5},
        [278, 389, 78, 260, 217, 423, 124, 189, 423, 269],
        [8, 20, 12, 12, 12, 12, 12, 12, 12, 12],
        {0: 1, 6: 2, 7: 3, 8: 4, 9: 5, 10: 6, 11: 7, 12: 8, 13: 9, 14: 10},
    ),
}
"""What `generate_diffusion_style` gave for the prompt 8, 402 with L = 8, r' = 2, init_scale 0 and a wavefront of 8 and
the weights of the golden file: tokens, recurrences at each one's predecessor, and tokens by iteration."""


@pytest.mark.slow  # each of the three compiles a model of eight layers
@pytest.mark.parametrize("exit", OFFICIAL)
def test_official_traces(exit):
    arrays, _ = official_outputs("huginn_tiny")
    tensors = {name[2:]: arrays[name] for name in arrays.files if name.startswith("w/")}
    config = dataclasses.replace(test_huginn.OFFICIAL, state_std=1e-30, cache="compress-s4")
    model = fold(config, test_huginn.params_of(tensors, config), {}, 8)
    changes, tokens, depths, iterations = OFFICIAL[exit]
    sampler = quirky(exit, inner_recurrences=2, wavefront=8, **changes)
    # The last tokens need those behind them, which the published code computes and this one doesn't.
    found = arrivals(sampler, 20, model, (8, 402))
    assert {at: count for at, count in found.items() if count <= 10} == iterations
    (row,) = Engine(model, sampler).generate([[8, 402]], 20)
    assert row.tokens[:10] == tokens
    assert row.depths[:10] == depths


# What is refused.


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (test_universal.TINY, "rule it was trained with; take the sampler static"),
        (test_ouro.TINY, "no input beside the state"),
        (test_algoformer.TINY, "no input beside the state"),
        (dataclasses.replace(test_huginn.TINY, depth_draw="fixed"), "one depth only"),
    ],
)
def test_families_that_cannot_are_refused(config, said):
    with pytest.raises(UserError, match=f"sampler diffusion-forcing: .*{said}"):
        Engine(FoldedModel({}, {}, build(config), 4), DiffusionForcing())


def test_settings_that_are_refused():
    for changes in (
        {"inner_recurrences": 0},
        {"wavefront": 0},
        {"headway": 0},
        {"threshold": -1},
        {"momentum": 1.0},
        {"noise": 1.5},
        {"init_scale": -1},
    ):
        with pytest.raises(UserError, match=f"sampler.{next(iter(changes))} .*must be"):
            DiffusionForcing(**changes)
    with pytest.raises(UserError, match="inner_recurrences 5: must be at most the depth, 4"):
        Engine(halving(4), DiffusionForcing(5))
    for changes, said in (
        ({"wavefront": 1}, "wavefront of 1 never comes to an end.*2 or more"),
        ({"exit": "latent-acceleration"}, "take another exit"),
        ({"prefill": False}, "--sampler.prefill true"),
    ):
        with pytest.raises(UserError, match=f"official_quirks: .*{said}"):
            DiffusionForcing(official_quirks=True, **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"fails with a wavefront of 3; take .* 7 or more"):
        Engine(halving(), quirky("fixed", inner_recurrences=2, wavefront=3))
