"""How deep train steps go: the draws, one program for all depths, rows with depths of their own, losses at several."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import build, forward
from dreamer_jax.families.contract import Drawn
from dreamer_jax.parallel import batch_spec, make_mesh
from dreamer_jax.training import depths
from dreamer_jax.training.batch import batch_entries
from dreamer_jax.training.state import abstract_state, create_state
from dreamer_jax.training.train_step import make_train_step
from tests.families.cases import TINY_MODELS, drawn_params, random_weights, small_config
from tests.families.puzzle_cases import puzzles
from tests.training.cases import random_batch, tiny_config

DREAMER = build(small_config(depth=5))
KEYS = jax.random.split(jax.random.key(3), 4000)


def drawn(step: int = 0, keys: jax.Array = KEYS, **settings: Any) -> np.ndarray:
    """What many steps draw."""
    config = RecurrenceConfig(**settings)
    rows = jnp.arange(8)
    return np.asarray(jax.vmap(lambda key: depths.draw(config, DREAMER, key, jnp.int32(step), rows).depth)(keys))


# The draws.


def test_uniform_draws_take_every_depth_alike():
    found, counts = np.unique(drawn(draw="uniform", least=2), return_counts=True)
    np.testing.assert_array_equal(found, [2, 3, 4, 5])
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(1000 * 0.75))


def test_long_tailed_draws_have_their_mean_and_end():
    """1 + Poisson has the mean of the rate and one more; of 1 + floor(exponential), 1 / (1 - exp(-1 / mean))."""
    found = drawn(draw="poisson_lognormal", mean=4, most=100)
    assert abs(found.mean() - 5) < 4 * found.std() / np.sqrt(len(found))
    spread = np.sqrt(4 + 16 * (np.exp(0.25) - 1))  # of a Poisson whose rate is log-normal with sigma 1/2
    assert abs(found.std() / spread - 1) < 0.1
    found = drawn(draw="exponential", mean=4, most=1000)
    assert abs(found.mean() - 1 / (1 - np.exp(-0.25))) < 4 * found.std() / np.sqrt(len(found))
    found = drawn(draw="exponential", mean=3, least=2)
    assert (found.min(), found.max()) == (2, 12)


@pytest.mark.parametrize("how", ["poisson_lognormal", "exponential"])
def test_draws_beyond_32_bits_are_the_deepest(how):
    """They would wrap around, and be the least."""
    assert drawn(keys=KEYS[:200], draw=how, mean=2**31 - 1, most=8).min() == 8


@pytest.mark.parametrize("curriculum", ["linear", "one_minus_sqrt"])
def test_curricula(curriculum):
    """From the least to the whole: of the four depths between, the share, rounded up."""
    how = {"draw": "fixed", "curriculum": curriculum, "curriculum_steps": 100}
    found = [int(drawn(step, KEYS[:1], **how)[0]) for step in range(0, 111, 5)]
    share = np.minimum(np.arange(0, 111, 5) / 100, 1)
    grown = share if curriculum == "linear" else 1 - np.sqrt(1 - share)
    np.testing.assert_array_equal(found, 1 + np.ceil(np.float32(4) * np.float32(grown)))


def test_the_most_of_a_uniform_draw_grows():
    """After a quarter of the curriculum from one depth to five, depths are one or two."""
    assert set(drawn(25, draw="uniform", curriculum="linear", curriculum_steps=100)) == {1, 2}


def test_a_step_without_the_section_goes_as_deep_as_the_family():
    config = RecurrenceConfig()
    rows = jnp.arange(8)
    assert depths.draw(config, DREAMER, jax.random.key(0), jnp.int32(0), rows) == Drawn(5, 5)
    assert depths.draw(RecurrenceConfig(draw="fixed", mean=3), DREAMER, KEYS[0], jnp.int32(0), rows) == Drawn(3, 3)


def test_a_fixed_depth_never_exceeds_the_most():
    """There is memory for no more, with a curriculum or without."""
    assert drawn(keys=KEYS[:1], draw="fixed", mean=8, most=4) == 4
    grown = [
        int(drawn(step, KEYS[:1], draw="fixed", mean=8, most=4, curriculum_steps=10)[0]) for step in (0, 5, 10, 20)
    ]
    assert grown == [1, 3, 4, 4]


def test_a_row_goes_as_deep_wherever_it_is():
    """By its number in the global batch: on whichever device, in whichever microbatch."""
    config = RecurrenceConfig(draw="uniform", most=100, by="row")
    whole = depths.draw(config, DREAMER, KEYS[0], jnp.int32(0), jnp.arange(16)).depth
    assert len(set(whole.tolist())) > 8
    parts = [depths.draw(config, DREAMER, KEYS[0], jnp.int32(0), jnp.arange(i, i + 4)).depth for i in range(0, 16, 4)]
    np.testing.assert_array_equal(jnp.concatenate(parts), whole)
    every = np.concatenate(
        [depths.draw(config, DREAMER, key, jnp.int32(0), jnp.arange(16)).depth for key in KEYS[:200]]
    )
    assert abs(every.mean() - 50.5) < 4 * every.std() / np.sqrt(every.size)


def test_outputs_that_a_family_does_not_speak_of():
    """Its loss would find none of them: said, and what to do, in place of a traceback from within the loss."""

    class Silent(type(build(TINY_MODELS["ouro"]))):
        flags = dataclasses.replace(build(TINY_MODELS["ouro"]).flags, weighs_depths=False)

    config = TINY_MODELS["ouro"]
    family, params, batch = Silent(config), jax.tree.map(jnp.asarray, drawn_params(config)), a_batch(config)
    rows = Drawn(jnp.full(len(batch["tokens"]), 2), 2)
    for drawn, kept in ((rows, 0), (Drawn(2, 2), 1)):
        with pytest.raises(UserError, match=r"family ouro have outputs .* weighs_depths=True"):
            forward(family, params, {}, batch, drawn, kept_states=kept)


def test_a_row_that_waits_is_not_counted():
    """Also where rows with fewer depths begin later."""
    config = TINY_MODELS["huginn"]

    class Counting(type(build(config))):
        def step(self, weights, state, inputs, depth, memory, context, tape=None):
            stepped = super().step(weights, state, inputs, depth, memory, context, tape)
            return stepped._replace(counts={"tokens": jnp.sum(context.segment_ids > 0, keepdims=True)})

    family, params = Counting(config), jax.tree.map(jnp.asarray, drawn_params(config))
    batch = jax.tree.map(lambda rows: rows[:2], a_batch(config))
    passed = forward(family, params, {}, batch, Drawn(jnp.array([1, 3]), 3), key=jax.random.key(0))
    of_each = jnp.sum(batch["segment_ids"] > 0, axis=1)
    assert np.asarray(passed.counts["tokens"]).sum() == of_each[0] + 3 * of_each[1]


def test_steps_that_are_not_scored_need_no_depths():
    depths.check(RecurrenceConfig(draw="uniform", steps=0, depths_per_step=6), DREAMER)


def test_what_cannot_be_is_refused():
    layered = build(small_config("LA"))
    ouro = build(TINY_MODELS["ouro"])
    algoformer = build(dataclasses.replace(TINY_MODELS["algoformer"], score="all", scored=1))  # reads one output
    wrong = [
        (RecurrenceConfig(draw="uniform", most=9), layered, "recurrence.most: 9 is more than the model's 3 layers"),
        (RecurrenceConfig(draw="uniform", least=7), DREAMER, "recurrence.least: 7 is more than the most, 5"),
        (
            RecurrenceConfig(draw="fixed", mean=2, least=4, most=6),
            DREAMER,
            "recurrence.least: 4 is more than the mean, 2",
        ),
        (
            RecurrenceConfig(draw="exponential", least=7, most=9),
            DREAMER,
            "recurrence.least: 7 is more than the mean, 5",
        ),
        (
            RecurrenceConfig(draw="uniform", steps=1, depths_per_step=6),
            DREAMER,
            "recurrence.depths_per_step: 6 is more",
        ),
        (RecurrenceConfig(draw="uniform", by="row"), ouro, "recurrence.by: rows of family ouro"),
        (RecurrenceConfig(draw="uniform", by="row"), algoformer, "recurrence.by: rows of family algoformer"),
        (RecurrenceConfig(draw="uniform", scored=2), ouro, "recurrence.scored: the loss of family ouro"),
        (RecurrenceConfig(draw="uniform", by="row", scored=2), DREAMER, "recurrence.scored: rows"),
        (
            RecurrenceConfig(draw="uniform", by="row", differentiated=2),
            DREAMER,
            "recurrence.differentiated: family dreamer",
        ),
    ]
    for config, family, message in wrong:
        with pytest.raises(ConfigError, match=message):
            depths.check(config, family)
    depths.check(RecurrenceConfig(draw="uniform"), layered)
    for settings, key in (({"most": 4}, "most"), ({"draw": "fixed", "by": "row"}, "by")):
        with pytest.raises(ConfigError) as error:
            RecurrenceConfig(**settings)
        assert error.value.key == f"recurrence.{key}"


# One program for all depths.


def a_batch(config: Any) -> dict[str, jax.Array]:
    made = puzzles(config, rows=4) if not build(config).flags.generates else random_batch(1)
    return {name: jnp.asarray(its) for name, its in made.items()}


WEIGHING = {"ouro": {}, "algoformer": {}, "recursive": {"rank": 0, "share_norms": True, "exit_weight": 0.5}}
"""The families whose loss weighs several depths, as they do."""


@pytest.mark.slow_but("recursive")
@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_drawn_depth_is_that_depth(family):
    """Loss and gradients of a program that gets its depth as a number are those of a program of that depth alone."""
    config = dataclasses.replace(TINY_MODELS[family], depth=3, **WEIGHING.get(family, {}))
    model, params, batch = build(config), drawn_params(config), a_batch(config)
    state = jax.tree.map(lambda its: jnp.zeros(its.shape, its.dtype), model.shapes[1])

    def loss(params, drawn):
        passed = forward(model, params, state, batch, drawn, key=jax.random.key(1))
        return model.loss(params, passed, batch)[0]

    traced = jax.jit(jax.value_and_grad(lambda params, depth: loss(params, Drawn(depth, 3))))
    alone = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    for depth in (2, 3):
        found, wanted = traced(params, jnp.int32(depth)), alone(params, Drawn(depth, depth))
        np.testing.assert_allclose(found[0], wanted[0], rtol=2e-6)
        assert_close(found[1], wanted[1], 1e-5)


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Every leaf to `tolerance` of the largest magnitude of all."""
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale), found, wanted)


# Rows with depths of their own.


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["DR+DA", "DR"])
def test_rows_with_depths_of_their_own(variant):
    """Rows of 4, 1, 5 and 2 depths in two groups: loss, gradients and counts are those of each alone."""
    config = small_config(variant, depth=5)
    family, (params, bias), own = build(config), random_weights(config), np.array([4, 1, 5, 2])
    batch = {name: jnp.asarray(its[:4]) for name, its in random_batch(1).items()}

    @functools.partial(jax.jit, static_argnames="groups")
    @functools.partial(jax.value_and_grad, has_aux=True)
    def of_rows(params, rows, depth, groups, group_depths=None):
        its = {name: each[rows] for name, each in batch.items()}
        passed = forward(family, params, {"balancing": bias}, its, Drawn(depth, 6, None, groups, group_depths))
        return family.loss(params, passed, its)[0], passed.counts

    found = of_rows(params, jnp.arange(4), jnp.asarray(own), groups=2)
    deeper = of_rows(params, jnp.arange(4), jnp.asarray(own), groups=2, group_depths=jnp.array([3, 6]))
    jax.tree.map(np.testing.assert_array_equal, found[0], deeper[0])  # going on with nobody changes nothing
    assert_close(deeper[1], found[1], 1e-6)
    alone = [of_rows(params, jnp.arange(i, i + 1), jnp.int32(depth), groups=1) for i, depth in enumerate(own)]
    (loss, counts), gradients = jax.tree.map(lambda *rows: sum(rows), *alone)
    np.testing.assert_allclose(found[0][0], loss, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, found[0][1], counts)
    assert_close(found[1], gradients, 1e-5)


# Losses at several depths.


def test_losses_at_several_depths():
    """Of a step of four depths, the last three: the last's, and half the mean of the losses at depths 2 and 3."""
    config = small_config(depth=5, mixing="sequential")
    family, (params, bias) = build(config), random_weights(config)
    batch = {name: jnp.asarray(its[:3]) for name, its in random_batch(2).items()}
    how = RecurrenceConfig(draw="uniform", scored=3, scored_weight=0.5)

    def of(params, depth):
        passed = forward(family, params, {"balancing": bias}, batch, Drawn(depth, 5), kept_states=3)
        return depths.loss(how, family, params, passed, batch)

    def plain(params, depth):
        """The same with the states of a pass of that depth, read out one by one."""
        states: list[Any] = []
        passed = forward(family, params, {"balancing": bias}, batch, Drawn(depth, depth), kept_states=depth)
        for i in range(depth):
            state = jax.tree.map(lambda its, i=i: its[i], passed.states)
            states.append(family.loss(params, passed._replace(state=state), batch)[0])
        earlier = states[-3:-1]
        return states[-1] + (0.5 * sum(earlier) / len(earlier) if earlier else 0.0), states[-1]

    traced = jax.jit(jax.value_and_grad(of, has_aux=True))
    for depth in (1, 4):
        (found, logged), gradients = traced(params, jnp.int32(depth))
        (wanted, last), expected = jax.jit(jax.value_and_grad(plain, has_aux=True), static_argnums=1)(params, depth)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        np.testing.assert_allclose(logged["last_loss"], last, rtol=1e-6)
        assert logged["depth"] == depth * batch["loss_mask"].sum()
        assert_close(gradients, expected, 1e-5)


def test_fewer_depths_than_are_scored_where_steps_have_results():
    """The depths that there are, and steps have the results that they have without."""
    config = small_config("DR", depth=2)
    family, (params, bias) = build(config), jax.tree.map(jnp.asarray, random_weights(config))
    batch = {name: jnp.asarray(its[:3]) for name, its in random_batch(2).items()}
    batch["step_targets"] = jnp.stack([batch["targets"], jnp.flip(batch["targets"], 1)], axis=-1)

    @functools.partial(jax.jit, static_argnums=0)
    def of(scored):
        how = RecurrenceConfig(draw="fixed", scored=scored, steps=1.0)
        kept = depths.kept_states(how, family)
        passed = forward(family, params, {"balancing": bias}, batch, Drawn(2, 2), kept_states=kept)
        total, logged = depths.loss(how, family, params, passed, batch)
        return total, logged["steps_loss"]

    one, two, four = map(of, (1, 2, 4))
    assert one[0] < two[0] and one[1] == two[1]
    np.testing.assert_allclose(four, two, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
def test_a_loss_on_the_results_of_steps(each):
    """NumPy: step n's results by the state after n (or 2 n) depths, mean over the steps that a pass has depths for."""
    config = small_config("DR", depth=5)
    family, (params, bias) = build(config), jax.tree.map(jnp.asarray, random_weights(config))
    batch = {name: jnp.asarray(its[:3]) for name, its in random_batch(2).items()}
    asked = np.random.default_rng(0).integers(-20, 23, (3, 12, 3)).astype(np.int32)
    asked = np.maximum(asked, -1)
    batch["step_targets"] = jnp.asarray(asked)

    def passing(params, depth, kept):
        return forward(family, params, {"balancing": bias}, batch, Drawn(depth, 5), kept_states=kept)

    @functools.partial(jax.jit, static_argnums=2)
    def of(params, depth, weight):
        how = RecurrenceConfig(draw="uniform", steps=weight, depths_per_step=each if weight else 1)
        return depths.loss(how, family, params, passing(params, depth, depths.kept_states(how, family)), batch)

    for depth in (1, 4, 5):
        states = np.asarray(passing(params, depth, depth).states, np.float64)  # [L, B, S, h]
        logits = states @ np.asarray(params["head"], np.float64).T
        losses = np.log(np.exp(logits).sum(-1, keepdims=True)) - logits
        found = []
        for number in (1, 2, 3):
            if number * each <= depth:
                places = np.argwhere(asked[..., number - 1] >= 0)
                found.append(sum(losses[number * each - 1, b, s, asked[b, s, number - 1]] for b, s in places))
        expected = sum(found) / max(len(found), 1)
        (without, _), (total, logged) = (of(params, jnp.int32(depth), weight) for weight in (0.0, 0.5))
        np.testing.assert_allclose(logged["steps_loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(total, without + 0.5 * expected, rtol=1e-5)
        np.testing.assert_allclose(logged["last_loss"], without, rtol=1e-6)


def test_the_results_of_steps_reach_the_gradient():
    """Of what the first depth does, against a pass of one depth that is asked for the first step's results alone."""
    config = small_config("DR", depth=2)
    family, (params, bias) = build(config), jax.tree.map(jnp.asarray, random_weights(config))
    batch = {name: jnp.asarray(its[:3]) for name, its in random_batch(2).items()}
    targets = jnp.where(jnp.arange(12) % 3 == 0, batch["targets"], -1)
    batch["step_targets"] = targets[..., None]
    how = RecurrenceConfig(draw="fixed", mean=2, steps=1.0)

    def whole(params):
        passed = forward(family, params, {"balancing": bias}, batch, Drawn(2, 2), kept_states=2)
        return depths.loss(how, family, params, passed, batch)[0] - family.loss(params, passed, batch)[0]

    def alone(params):
        passed = forward(family, params, {"balancing": bias}, batch, Drawn(2, 2), kept_states=2)
        state = jax.tree.map(lambda its: its[0], passed.states)
        wanted = {**batch, "targets": jnp.maximum(targets, 0), "loss_mask": targets >= 0}
        return family.loss(params, passed._replace(state=state), wanted)[0]

    gradients, expected = (jax.jit(jax.grad(f))(params) for f in (whole, alone))
    assert_close(gradients, expected, 1e-5)
    assert float(jnp.abs(gradients["layer"]["expert_attention"]["down"]).max()) > 0


def test_what_a_settling_loss_pulls_at():
    """Both of the last states, by hand; neither by the size of the stream, or a model would learn to grow, and nothing
    where there is one depth only."""
    config = small_config("DR", depth=4, residual_norm=False)
    family, (params, bias) = build(config), jax.tree.map(jnp.asarray, random_weights(config))
    batch = {name: jnp.asarray(its[:3]) for name, its in random_batch(2).items()}
    passed = jax.eval_shape(lambda: forward(family, params, {"balancing": bias}, batch, Drawn(4, 4), kept_states=2))
    drawn = np.random.default_rng(0)
    passed = jax.tree.map(lambda part: jnp.asarray(drawn.normal(size=part.shape), part.dtype), passed)

    @jax.jit
    def part(states, depth):
        at = passed._replace(states=states, state=states[1], depth=depth)
        with_it, without = (
            depths.loss(RecurrenceConfig(draw="uniform", settling=settling), family, params, at, batch)[0]
            for settling in (0.5, 0.0)
        )
        return with_it - without

    pulls = jax.jit(jax.grad(part))
    before, after = np.asarray(passed.states, np.float64)
    size = (after**2).sum(-1, keepdims=True)
    pull = (after - before) / size * np.asarray(batch["loss_mask"])[..., None]
    np.testing.assert_allclose(pulls(passed.states, jnp.int32(3)), [-pull, pull], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pulls(passed.states, jnp.int32(1)), 0, atol=1e-6)


@pytest.mark.slow
def test_a_settling_loss():
    """The last depth's change relative to its stream, over the targets; of one depth there is none. Its gradient leaves
    the size of the stream alone, or a model would learn to grow."""
    config = small_config("DR", depth=4, residual_norm=False)
    family, (params, bias) = build(config), jax.tree.map(jnp.asarray, random_weights(config))
    batch = {name: jnp.asarray(its[:3]) for name, its in random_batch(2).items()}

    def passing(params, depth, kept):
        return forward(family, params, {"balancing": bias}, batch, Drawn(depth, 4), kept_states=kept)

    @functools.partial(jax.jit, static_argnums=2)
    def of(params, depth, settling):
        how = RecurrenceConfig(draw="uniform", settling=settling)
        return depths.loss(how, family, params, passing(params, depth, depths.kept_states(how, DREAMER)), batch)

    def change_of(states):
        return (
            ((states[1] - states[0]) ** 2).sum(-1) / (states[1] ** 2).sum(-1) * np.asarray(batch["loss_mask"])
        ).sum()

    (without, _), (found, logged) = (of(params, jnp.int32(3), settling) for settling in (0.0, 0.5))
    states = np.asarray(passing(params, 3, 2).states, np.float64)
    np.testing.assert_allclose(states[1], passing(params, 3, 0).state, rtol=1e-6)
    np.testing.assert_allclose(logged["last_change"], change_of(states), rtol=1e-5)
    np.testing.assert_allclose(found, without + 0.5 * change_of(states), rtol=1e-5)
    np.testing.assert_allclose(logged["last_loss"], without, rtol=1e-6)
    assert of(params, jnp.int32(1), 0.5)[0] == of(params, jnp.int32(1), 0.0)[0]

    def by_hand(params):
        before, after = passing(params, 3, 2).states
        size = jax.lax.stop_gradient(jnp.sum(after**2, -1))
        return of(params, jnp.int32(3), 0.0)[0] + 0.5 * jnp.sum(jnp.sum((after - before) ** 2, -1) / size * mask)

    mask = batch["loss_mask"]
    gradients, expected = (jax.grad(f)(params) for f in (lambda params: of(params, jnp.int32(3), 0.5)[0], by_hand))
    assert_close(gradients, expected, 1e-5)


# In a train step.


@functools.cache
def trained(by: str, devices: int = 1, expert: int = 1, microbatches: int = 1) -> list[tuple[float, ...]]:
    """(loss, depth, norm of the gradient) of three steps."""
    config = tiny_config(
        model__depth=3,
        recurrence__draw="uniform",
        recurrence__by=by,
        recurrence__groups=2,
        mesh__data=(devices,),
        mesh__expert=expert,
        training__microbatches=microbatches,
    )
    mesh = make_mesh(config.mesh)
    step, state, found = make_train_step(config, mesh), create_state(config, mesh), []
    for seed in range(3):
        state, metrics = step(state, random_batch(seed))
        found.append(tuple(float(metrics[name]) for name in ("loss", "depth", "gradient_norm")))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("by", ["step", "row"])
def test_a_train_step_at_drawn_depths(by):
    """Depths vary and are logged: a whole number for all rows, or the mean over the targets."""
    depths_of = [depth for _, depth, _ in trained(by)]
    assert len(set(depths_of)) > 1
    assert min(depths_of) >= 1 and max(depths_of) <= 3
    assert all(depth == int(depth) for depth in depths_of) == (by == "step")


@pytest.mark.slow
def test_devices_draw_the_same_depth():
    np.testing.assert_allclose(trained("step", 8), trained("step"), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"devices": 8}, {"devices": 2, "expert": 4}, {"microbatches": 2}])
def test_rows_go_as_deep_on_any_mesh(mesh):
    """Also where devices exchange tokens in every depth, whose deepest rows differ."""
    np.testing.assert_allclose(trained("row", **mesh), trained("row"), rtol=1e-4)


@pytest.mark.parametrize("expert", [1, 2])
def test_groups_that_do_not_divide_the_rows_of_a_device(expert):
    """Are refused in one line, where devices compute depths together as elsewhere."""
    config = tiny_config(model__variant="DR", training__batch_size=24, mesh__data=(4 // expert,), mesh__expert=expert)
    config = dataclasses.replace(config, recurrence=RecurrenceConfig(draw="uniform", by="row"))
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, batch_spec(mesh)))
        for name, (shape, dtype) in batch_entries(config).items()
    }
    with pytest.raises(UserError, match="6 rows at once can't be divided into 4 groups"):
        make_train_step(config, mesh).lower(abstract_state(config, mesh), batch)
