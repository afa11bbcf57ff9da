"""What train steps do is counted at the depths that they go to: FLOPs, utilisation, memory and bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dreamer_jax.budget import analytic, memory
from dreamer_jax.chips import Chip
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.config.sections import Config, DataConfig, TrainingConfig
from dreamer_jax.families import Family, build
from dreamer_jax.planning.step_cost import applications, operations
from dreamer_jax.training.metrics import model_flop_utilisation
from dreamer_jax.training.work import deepest_of, work_of
from tests.families.cases import TINY_MODELS, small_config

MODEL = small_config(depth=6, attention_experts=False)
"""With as many parameters at any depth."""


def config(model: Any = MODEL, data: Any = None, **recurrence: Any) -> Config:
    return Config(
        model=model,
        recurrence=RecurrenceConfig(**recurrence),
        data=data or DataConfig(sequence_length=32),
        training=TrainingConfig(steps=100, batch_size=8),
    )


def mean(found: Config) -> float:
    work = work_of(found)
    assert sum(its.share for its in work) == pytest.approx(1)
    return sum(its.share * its.depth for its in work)


def at(depth: int) -> Family:
    return build(dataclasses.replace(MODEL, depth=depth))


@pytest.mark.parametrize(
    "recurrence, expected",
    [
        ({}, 6),
        ({"draw": "fixed", "mean": 4}, 4),
        ({"draw": "uniform", "least": 2, "most": 9}, 5.5),
        ({"draw": "exponential", "most": 1000}, 6.51),  # 1 / (1 - exp(-1 / 6))
        ({"draw": "poisson_lognormal", "sigma": 0.1, "by": "row"}, 7),  # one more than the Poisson
        # 2 4 6 6 of five twentieths each, and 6 from then on: ceil(4 t) + 2
        (
            {"draw": "fixed", "least": 2, "curriculum_steps": 20},
            0.8 * 6 + 0.2 * (2 / 20 + (3 + 4 + 5) * 5 / 20 + 6 * 4 / 20),
        ),
    ],
)
def test_mean_depths(recurrence: dict[str, Any], expected: float) -> None:
    assert mean(config(**recurrence)) == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_families_that_draw_their_depths() -> None:
    """1 + Poisson for Huginn, whose `depth` is the Poisson's mean; truncated after the last eight."""
    huginn = HuginnConfig(
        vocab_size=64, hidden_size=16, heads=2, kv_heads=2, mlp_size=16, depth=12, gradient_recurrences=8
    )
    assert mean(config(huginn)) == pytest.approx(13, rel=0.02)
    assert all(its.differentiated == min(its.depth, 8) for its in work_of(config(huginn)))
    # A curriculum differentiates its mean at most: after three of 12 steps, which is a quarter, three.
    growing = config(dataclasses.replace(huginn, curriculum_steps=12))
    assert {its.differentiated for its in work_of(growing, 4)} == {1, 2, 3}
    assert any(its.depth > 8 and its.differentiated == 3 for its in work_of(growing, 4))
    assert max(its.differentiated for its in work_of(growing, 24)) == 8


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "huginn")) for n in TINY_MODELS])
def test_what_is_not_drawn_is_counted_as_ever(name: str) -> None:
    model = TINY_MODELS[name]
    family, work = build(model), work_of(config(model))
    if len(work) == 1:
        assert analytic.training_flops(family, 32, work) == analytic.training_flops(family, 32)
        assert analytic.executed_training_flops(family, 32, True, work) == analytic.executed_training_flops(
            family, 32, True
        )
    for remat in ("none", "attention", "full"):
        assert memory.training(family, 32, 2, remat, deepest_of(config(model))) == memory.training(family, 32, 2, remat)


def test_flops_are_those_of_models_of_the_depths() -> None:
    found = config(draw="uniform", least=2, most=9)
    models = [analytic.training_flops(at(depth), 32) for depth in range(2, 10)]
    counted = analytic.training_flops(build(MODEL), 32, work_of(found))
    assert counted == pytest.approx([sum(each) / len(models) for each in zip(*models, strict=True)], rel=0.01)
    executed = [analytic.executed_training_flops(at(depth), 32, True)[0] for depth in range(2, 10)]
    counted = analytic.executed_training_flops(build(MODEL), 32, True, work_of(found))
    assert counted[0] == pytest.approx(sum(executed) / len(executed), rel=0.01)


def test_truncated_depths_are_passed_forward_alone() -> None:
    family = build(MODEL)
    _, depth = analytic.flops_by_depth(family, 16.5)
    all_depths, _ = analytic.training_flops(family, 32, work_of(config(draw="fixed")))
    last_two, _ = analytic.training_flops(family, 32, work_of(config(draw="fixed", differentiated=2)))
    assert all_depths - last_two == pytest.approx(2 * 4 * depth)


def test_every_loss_has_a_head() -> None:
    family = build(MODEL)
    head = 3 * analytic.matmul_flops(family, 16.5)["head"]
    flops = lambda **given: analytic.training_flops(family, 32, work_of(config(**given)))[0]  # noqa: E731
    once = flops(draw="fixed")
    assert flops(draw="fixed", scored=3) - once == pytest.approx(2 * head)
    assert flops(draw="fixed", scored=30) - once == pytest.approx(5 * head)  # there are six depths
    boolean = DataConfig(source="task", task="boolean", sequence_length=32, difficulty=5)
    steps = {"data": boolean, "draw": "fixed", "steps": 1.0, "depths_per_step": 2}
    assert flops(**steps) - once == pytest.approx(3 * head)  # the other two come after the sixth depth


def test_every_loss_passes_the_coda() -> None:
    huginn = dataclasses.replace(TINY_MODELS["huginn"], depth=5, coda_layers=2)
    family, flops = build(huginn), {}
    for scored in (1, 3):
        found = config(huginn, draw="fixed", scored=scored)
        flops[scored] = analytic.training_flops(family, 32, work_of(found))[0]
    behind = analytic.matmul_flops(family, 16.5)
    assert flops[3] - flops[1] == pytest.approx(2 * 3 * (behind["coda"] + behind["head"]))


def test_losses_of_all_depths_are_those_of_the_depths_that_there_are() -> None:
    ouro = dataclasses.replace(TINY_MODELS["ouro"], depth=4)
    for least, most in ((2, 2), (1, 8)):
        found = config(ouro, draw="uniform", least=least, most=most)
        counted = analytic.training_flops(build(ouro), 32, work_of(found))[0]
        each = [
            analytic.training_flops(build(dataclasses.replace(ouro, depth=depth)), 32)[0]
            for depth in range(least, most + 1)
        ]
        assert counted == pytest.approx(sum(each) / len(each), rel=0.01)


def test_every_loss_of_an_algoformer_passes_its_last_layers_over_the_whole_row() -> None:
    model = dataclasses.replace(TINY_MODELS["algoformer"], depth=6, scored=3, post_layers=2)
    family, once = build(model), build(dataclasses.replace(model, scored=1))
    behind = analytic.matmul_flops(family, 16.5)
    each = 3 * (behind["post"] + behind["head"])
    for depth, losses in ((6, 3), (4, 3), (2, 2), (9, 3)):
        work = work_of(config(model, draw="fixed", mean=depth))
        further = analytic.training_flops(family, 32, work)[0] - analytic.training_flops(once, 32, work)[0]
        assert further == pytest.approx((losses - 1) * each), depth
    again = [
        analytic.executed_training_flops(its, 32, False)[0] - analytic.training_flops(its, 32)[0]
        for its in (family, once)
    ]
    assert again[0] - again[1] == pytest.approx(2 * behind["post"])
    scores = [
        sum(
            its.flops
            for its in operations(config(dataclasses.replace(model, scored=scored)), "v5p")
            if "scores" in its.name
        )
        for scored in (1, 3)
    ]
    assert scores[1] / scores[0] == pytest.approx((1 + 6 + 3 * 2) / (1 + 6 + 2))  # pre, loop, post


def test_operations_of_depths_without_gradient_take_a_third() -> None:
    """And of `remat: full` a quarter: forward, again, and two backward."""
    model = dataclasses.replace(MODEL, hidden_size=128)
    for remat, share in (("none", 3), ("full", 4)):
        flops = {}
        for differentiated in (0, 2):
            found = config(model, draw="fixed", differentiated=differentiated)
            found = dataclasses.replace(found, training=dataclasses.replace(found.training, remat=remat))
            flops[differentiated] = {its.name: its.flops for its in operations(found, "v5p") if "head" not in its.name}
        for name, whole in flops[0].items():
            assert flops[2][name] == pytest.approx(whole * (2 + 4 / share) / 6), name


def test_the_size_of_a_jacobian_takes_two_products_of_a_depth() -> None:
    family = build(MODEL)
    flops = lambda **given: analytic.training_flops(family, 32, work_of(config(**given)))[0]  # noqa: E731
    _, depth = analytic.flops_by_depth(family, 16.5)
    assert flops(draw="fixed", jacobian=0.1) - flops(draw="fixed") == pytest.approx(3 * 2 * depth)


def test_utilisation_counts_the_depths_of_the_steps() -> None:
    chip = Chip("test", 1e12, 1e12, 1e9, 1e9)
    shallow = config(dataclasses.replace(MODEL, depth=2))
    assert model_flop_utilisation(config(draw="fixed", mean=2), 1e3, chip) == pytest.approx(
        model_flop_utilisation(shallow, 1e3, chip)
    )


def test_memory_is_that_of_the_deepest_step() -> None:
    found = config(draw="poisson_lognormal", mean=3, most=9)
    for remat in ("none", "attention", "full"):
        its = memory.training(build(MODEL), 32, 2, remat, deepest_of(found))
        assert its == memory.training(at(9), 32, 2, remat)


def test_memory_is_that_of_the_deepest_step_of_a_family_that_draws() -> None:
    """A Huginn of 4 recurrences on average keeps 16 of its deepest step where so many are differentiated, not 4."""
    shallow = dataclasses.replace(TINY_MODELS["huginn"], depth=4, gradient_recurrences=16)
    found = deepest_of(config(shallow))
    assert found.differentiated == 16 <= found.depth
    for remat in ("none", "attention", "full"):
        its = memory.training(build(shallow), 32, 2, remat, found)
        assert its == memory.training(build(dataclasses.replace(shallow, depth=16)), 32, 2, remat)


def test_scores_are_kept_of_differentiated_depths_alone() -> None:
    found = {
        few: memory.scores(build(MODEL), 32, 2, "none", deepest_of(config(draw="fixed", differentiated=few)))
        for few in (0, 2)
    }
    assert found[2] == found[0] / 3 > 0
    huginn = build(dataclasses.replace(TINY_MODELS["huginn"], depth=12, gradient_recurrences=3, prelude_layers=0))
    assert memory.scores(huginn, 32, 2, "none") == 3 * memory.scores(huginn, 32, 2, "full")


def test_a_plan_counts_the_depths_of_the_steps() -> None:
    found = config(draw="fixed", mean=9, differentiated=3)
    for share in build(MODEL).blocks():
        expected = (share.depths, share.depths) if share.outside else (share.depths * 9 / 6, share.depths * 3 / 6)
        assert applications(found, share) == expected
