"""The Universal Transformer: its accounting against official outputs, the model against its equations, decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.halting import Pondered, ponder
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.signals import Signals
from dreamer_jax.budget import memory, program
from dreamer_jax.config.models.universal import UniversalConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build, depth_of, forward, initialise
from dreamer_jax.families.universal import State
from dreamer_jax.inference import Engine, fold
from tests.families import plain_universal as plain
from tests.families.cases import logits_in_flight, until_stopped
from tests.outside import official_outputs

TAGS = ("b1_t0.9", "b1_t0.99", "b-1_t0.99")
TINY = UniversalConfig(depth=4, hidden_size=16, heads=2, mlp_size=24, vocab_size=23, ponder_weight=0.1, dtype="float32")
FORMS = {
    "graves": TINY,
    "interpolate": dataclasses.replace(TINY, halting="interpolate"),
    "changing": dataclasses.replace(TINY, copy_halted=False),
    "none": dataclasses.replace(TINY, halting="none"),
}
ROWS, LENGTH = 2, 7


# The accounting.


@pytest.fixture(scope="module")
def official():
    return official_outputs("ut_act_tiny")[0]


def official_inputs(arrays, tag):
    inputs = {name: arrays[path] for name, path in (("fn_W", "fn/W"), ("fn_b", "fn/b"), ("state_in", "state_in"))}
    return inputs | {"p_weight": arrays["act/p_weight"], "p_bias": np.float32(tag[1:].split("_")[0])}


@functools.partial(jax.jit, static_argnames="steps")
def official_pass(inputs, place, step_signal, epsilon, steps=6):
    """The tiny model of the golden file, whose layer is one tanh, with our accounting; p and state of every step."""
    state, pondered, seen = inputs["state_in"], Pondered.none(*inputs["state_in"].shape), []
    for t in range(steps):
        state = state + place + step_signal[:, t : t + 1]
        p = jax.nn.sigmoid(state @ inputs["p_weight"][0] + inputs["p_bias"])
        state = jnp.tanh(state @ inputs["fn_W"].T + inputs["fn_b"])
        pondered = ponder(pondered, p, state, jnp.bool_(t == steps - 1), epsilon, "interpolate")
        seen.append((p, state))
    return pondered, *map(jnp.stack, zip(*seen, strict=True))


def official_of(arrays, inputs, tag):
    length, epsilon = inputs["state_in"].shape[1], 1 - float(tag.partition("_t")[2])
    return official_pass(inputs, arrays["time_signal"][:, :length], arrays["step_signal"], epsilon)


@pytest.mark.parametrize("tag", TAGS)
def test_official_accounting(official, tag):
    pondered, p, states = official_of(official, official_inputs(official, tag), tag)
    steps = len(official[f"{tag}/p_per_step"])
    np.testing.assert_allclose(p[:steps], official[f"{tag}/p_per_step"], atol=1e-5)
    np.testing.assert_allclose(states[:steps], official[f"{tag}/state_per_step"], atol=1e-5)
    np.testing.assert_allclose(pondered.output, official[f"{tag}/y"], atol=1e-5)
    np.testing.assert_allclose(pondered.remainder, official[f"{tag}/remainders"], atol=1e-5)
    np.testing.assert_array_equal(pondered.updates, official[f"{tag}/n_updates"])


def test_official_gradients(official):
    """Of sum(y * g) + 0.01 mean(N + R). The file doesn't have g [2, 7, 16]; all gradients are linear in it, so the g
    that explains two settings must explain the third, and only does if R has its gradient and N has none."""
    left, right, right_of_y = {}, {}, {}
    for tag in TAGS:
        inputs = official_inputs(official, tag)
        by_y = jax.jacrev(lambda its, tag=tag: official_of(official, its, tag)[0].output.reshape(-1))(inputs)
        by_cost = jax.grad(lambda its, tag=tag: 0.01 * official_of(official, its, tag)[0].cost.mean())(inputs)
        names = sorted(inputs)
        left[tag] = np.concatenate([np.float64(by_y[name]).reshape(224, -1) for name in names], 1).T
        right_of_y[tag] = np.concatenate([np.float64(official[f"{tag}/grad/{name}"]).reshape(-1) for name in names])
        right[tag] = right_of_y[tag] - np.concatenate([np.float64(by_cost[name]).reshape(-1) for name in names])

    def error(right, fitted):
        its = [np.concatenate([side[tag] for tag in fitted]) for side in (left, right)]
        g = np.linalg.lstsq(*its)[0]
        return max(np.abs(left[tag] @ g - right[tag]).max() for tag in TAGS)

    assert error(right, TAGS[:2]) < 1e-4 and error(right, TAGS) < 1e-5
    assert error(right_of_y, TAGS) > 1e-4


@functools.cache
def pondering(form):
    """(p [T, B, S], states [T, B, S, h], epsilon) -> what they come to, jitted."""

    def run(p, states, epsilon):
        pondered = Pondered.none(*states.shape[1:])
        for t in range(len(p)):
            pondered = ponder(pondered, p[t], states[t], jnp.bool_(t == len(p) - 1), epsilon, form)
        return pondered

    return jax.jit(run)


def draws(high, steps=6):
    rng = np.random.default_rng(4)
    return rng.uniform(0, high, (steps, 8, 40)).astype(np.float32), rng.normal(size=(steps, 8, 40, 4))


@pytest.mark.parametrize("high", [0.1, 0.5, 1.0])
def test_weights_of_the_sum_are_one(high):
    """Graves: with states of ones the output is one everywhere, also where the last step is forced; N <= T."""
    p, states = draws(high)
    found = pondering("graves")(p, np.ones_like(states), 0.01)
    np.testing.assert_allclose(found.output, 1, atol=1e-6)
    np.testing.assert_array_equal(found.total, 1)
    enough = np.cumsum(p, 0, dtype=np.float64) > 0.99
    np.testing.assert_array_equal(found.updates, np.where(enough.any(0), enough.argmax(0) + 1, len(p)))
    assert enough.any() != (high == 0.1) and found.updates.min() >= 1


def test_one_step_and_never():
    """p = 1 halts at once, and y is that state in both forms; p = 0 takes all steps, and y is the last state with the
    forced remainder and nothing without."""
    _, states = draws(1.0)
    for form in ("graves", "interpolate"):
        at_once = pondering(form)(np.ones(states.shape[:3], np.float32), states, 0.01)
        np.testing.assert_allclose(at_once.output, states[0], rtol=1e-6)
        assert np.all(at_once.updates == 1) and np.all(at_once.remainder == 1)
        never = pondering(form)(np.zeros(states.shape[:3], np.float32), states, 0.01)
        assert np.all(never.updates == len(states))
        np.testing.assert_allclose(never.output, states[-1] * (form == "graves"), atol=1e-6)
        np.testing.assert_array_equal(never.remainder, float(form == "graves"))


def test_the_ponder_cost_has_its_gradient_through_the_remainder():
    """d(N + R)/dp_t is -1 for t < N and 0 from N on: the cost makes positions halt sooner."""
    p, states = draws(0.5)
    gradient = jax.grad(lambda p: jnp.sum(pondering("graves")(p, states, 0.01).cost))(p)
    updates = pondering("graves")(p, states, 0.01).updates
    np.testing.assert_array_equal(gradient, -1.0 * (np.arange(len(p))[:, None, None] < updates - 1))


def test_signals_are_counted_from_one():
    positions = np.array([[0, 1, 5]])
    found = Signals(16)(jnp.zeros((1, 3, 16)), positions, Depth(jnp.int32(2), jnp.int32(9)))
    wanted = [plain.sinusoid(position + 1, 16) + plain.sinusoid(3, 16) for position in positions[0]]
    np.testing.assert_allclose(found[0], wanted, atol=1e-6)
    np.testing.assert_allclose(wanted[0][:2], [np.sin(1) + np.sin(3), np.cos(1) + np.cos(3)])


# The model.


@functools.cache
def drawn_params(halting_bias=-1.0):
    """Parameters of all forms in which nothing is one or zero; positions halt after different numbers of steps."""
    params, _ = initialise(build(TINY), jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.15 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    params = structure.unflatten(moved)
    params["halting"]["bias"] = jnp.full(1, halting_bias)
    return jax.device_get(params)


def of_form(params, form):
    return {name: params[name] for name in params if name != "halting"} if form == "none" else params


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, TINY.vocab_size, (ROWS, LENGTH)).astype(np.int32) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "loss_mask": rng.random((ROWS, LENGTH)) < 0.7}


@functools.cache
def compiled(form):
    """A form's one program: (params, batch) -> (loss, (logged, logits, state)), gradients."""
    family = build(FORMS[form])

    def run(params, batch):
        its = forward(family, params, {}, batch)
        loss, logged = family.loss(params, its, batch)
        hidden, _ = family.readout(params, its.state, its.memory, its.context)
        return loss, (logged, family.logits(params, hidden), its.state)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_loss_are_those_of_the_equations(form):
    params, its = of_form(drawn_params(), form), batch()
    (loss, (logged, logits, state)), _ = compiled(form)(params, its)
    wanted = plain.passed(FORMS[form], wide(params), its["tokens"])
    np.testing.assert_allclose(logits, wanted.logits, atol=1e-4)
    sums = its["tokens"], its["targets"], its["loss_mask"], np
    np.testing.assert_allclose(loss, plain.loss(FORMS[form], wide(params), *sums), rtol=1e-5)
    if form == "none":
        assert state.pondered is None and not logged
        return
    np.testing.assert_array_equal(state.pondered.updates, wanted.updates)
    np.testing.assert_allclose(state.pondered.remainder, wanted.remainder, atol=1e-5)
    assert set(np.unique(wanted.updates)) > {2, 4}
    assert logged["updates"] == (wanted.updates * its["loss_mask"]).sum()
    cost = (state.pondered.cost * its["loss_mask"]).sum()
    np.testing.assert_allclose(logged["last_loss"], loss - TINY.ponder_weight * cost, rtol=1e-5)
    assert cost > 0 < TINY.ponder_weight


@pytest.mark.parametrize("form", ["graves", "interpolate"])
def test_gradients_are_those_of_the_unrolled_loop(form):
    params, its = drawn_params(), batch()
    _, found = compiled(form)(params, its)
    sums = its["tokens"], its["targets"], its["loss_mask"], jnp
    wanted = jax.jit(jax.grad(lambda params: plain.loss(FORMS[form], params, *sums)))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        own = functools.reduce(lambda tree, key: tree[key.key], path, found)
        np.testing.assert_allclose(own, leaf, atol=1e-5 * max(1, np.abs(leaf).max()), err_msg=str(path))
    assert np.abs(wanted["halting"]["row"]).max() > 0.1


def test_a_large_bias_takes_one_step_and_a_small_one_all():
    for form in ("graves", "interpolate"):
        config = FORMS[form]
        _, (_, logits, state) = compiled(form)(drawn_params(20.0), batch())[0]
        once = plain.passed(
            dataclasses.replace(config, halting="none"), wide(drawn_params()), batch()["tokens"], steps=1
        )
        np.testing.assert_array_equal(state.pondered.updates, 1)
        np.testing.assert_allclose(logits, once.logits, atol=1e-4)
        _, (_, logits, state) = compiled(form)(drawn_params(-20.0), batch())[0]
        every = plain.passed(dataclasses.replace(config, halting="none"), wide(drawn_params()), batch()["tokens"])
        np.testing.assert_array_equal(state.pondered.updates, config.depth)
        np.testing.assert_allclose(logits, every.logits * (form == "graves"), atol=1e-4)


def test_a_copied_state_stays_and_another_changes():
    """After its last step a position's x is that step's; without copying it goes on, and others see that."""
    tokens = batch()["tokens"]
    found = {form: compiled(form)(drawn_params(), batch())[0][1] for form in ("graves", "changing")}
    wanted = {form: plain.passed(FORMS[form], wide(drawn_params()), tokens) for form in found}
    updates = wanted["graves"].updates
    at_last = np.take_along_axis(wanted["graves"].states, updates[None, ..., None] - 1, 0)[0]
    np.testing.assert_allclose(found["graves"][2].x, at_last, atol=1e-4)
    np.testing.assert_allclose(found["changing"][2].x, wanted["changing"].states[-1], atol=1e-4)
    apart = np.abs(found["graves"][1] - found["changing"][1]).max(-1)
    assert apart.max() > 1e-3


def test_the_published_bias_begins_shallow():
    """w starts at zero: sigmoid(1) = 0.73 takes two steps, sigmoid(-3) = 0.05 more than there are."""
    config = dataclasses.replace(TINY, depth=8)
    family = build(config)
    params, _ = initialise(family, jax.random.key(0))
    updates = jax.jit(lambda params: forward(family, params, {}, {"tokens": batch()["tokens"]}).state.pondered.updates)
    assert params["halting"]["bias"] == 1
    np.testing.assert_array_equal(updates(params), 2)
    params["halting"]["bias"] -= 4
    np.testing.assert_array_equal(updates(params), 8)


# Decoding.


@functools.cache
def folded(form):
    return fold(FORMS[form], of_form(drawn_params(), form), {})


@functools.cache
def expected(form):
    """Logits [B, S, V] of the whole rows, and N."""
    _, (_, logits, state) = compiled(form)(of_form(drawn_params(), form), batch())[0]
    return np.asarray(logits), None if state.pondered is None else np.asarray(state.pondered.updates)


@pytest.mark.parametrize("form", ["graves", "interpolate"])
def test_decoding_leaves_the_loop_and_gives_what_the_whole_pass_gives(form):
    """Position by position, each row N steps; keys at steps that weren't taken are the copied state's."""
    model, tokens = folded(form), batch()["tokens"]
    slots, (logits, updates) = model.empty_slots(ROWS, LENGTH + 2), expected(form)
    for place in range(LENGTH):
        places = jnp.full((ROWS, 1), place)
        logs, slots, depths = until_stopped(model, tokens[:, place, None], places, slots)
        np.testing.assert_array_equal(depths, updates[:, place])
        np.testing.assert_allclose(logs, jax.nn.log_softmax(logits[:, place]), atol=1e-4)
    deeper = [updates[:, place].max() > updates[:, :place].min() for place in range(1, LENGTH)]
    assert updates.max(0).min() < TINY.depth and any(deeper)


@pytest.mark.parametrize("form", ["graves", "changing", "none"])
def test_positions_at_different_depths(form):
    """Position i is at depth t - i at time t: each comes to what the pass over the row says."""
    model, places = folded(form), jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    found = logits_in_flight(model, batch()["tokens"], places, model.empty_slots(ROWS, LENGTH))
    np.testing.assert_allclose(found, expected(form)[0], atol=1e-4)


def test_the_engine_asks_who_has_halted():
    """Tokens are those of the whole pass; depths are the numbers of steps; other forms go through all steps."""
    prompts = [[1, 5, 6], [2, 7, 8, 9, 11]]
    model = folded("graves")
    engine = Engine(model)
    assert engine.exits_early
    family, depths = model.family, []
    whole = jax.jit(lambda tokens: forward(family, model.params, {}, {"tokens": tokens}))
    for prompt, row in zip(prompts, engine.generate(prompts, 6), strict=True):
        tokens = np.zeros((1, 12), np.int32)
        tokens[0, : len(prompt) + 6] = prompt + row.tokens
        its = whole(tokens)
        hidden, _ = family.readout(model.params, its.state, its.memory, its.context)
        likeliest = np.asarray(model.logits(hidden)[0].argmax(-1))
        generated = slice(len(prompt), len(prompt) + 5)
        assert row.tokens[1:] == likeliest[generated].tolist()
        assert row.depths[1:] == np.asarray(its.state.pondered.updates)[0, generated].tolist()
        depths += row.depths[1:]
    assert min(depths) < TINY.depth
    for form in ("changing", "none"):
        family = folded(form).family
        assert not Engine(folded(form)).exits_early
        state = State(jnp.zeros((1, 1, 16)), None if form == "none" else Pondered.none(1, 1, 16))
        assert family.finished({}, state, state, depth_of(0, 4)) is None


def test_reading_a_position_that_still_runs():
    """What is left of 1 goes to the present state, as if that step were the last."""
    family, rng = build(TINY), np.random.default_rng(3)
    x, y = rng.normal(size=(2, 1, 2, 16)).astype(np.float32)
    pondered = Pondered(y, np.array([[0.3, 1.0]], np.float32), np.zeros((1, 2)), np.ones((1, 2), int))
    hidden, _ = family.readout({}, State(jnp.asarray(x), pondered), None, None)
    np.testing.assert_allclose(hidden[0], [y[0, 0] + 0.7 * x[0, 0], y[0, 1]], rtol=1e-6)


# Counting, and what is refused.


@pytest.mark.parametrize("form", ["graves", "none"])
def test_both_counters_agree(form):
    config = dataclasses.replace(FORMS[form], depth=5, mlp_size=40)
    found = program.count(config, 24)
    assert found == program.expected(config, 24)
    h, f, halting = 16, 40, (17 if form == "graves" else 0)
    assert found.parameters == 23 * h + 4 * h * h + 2 * h * f + f + h + 4 * h + halting
    assert memory.caches(build(config), 10) == {"attention cache": 5 * 10 * 2 * h * 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 3}, "3 does not divide"),
        ({"hidden_size": 15, "heads": 3}, "pairs of a sine and a cosine"),
        ({"halting_epsilon": 1.0}, "below 1"),
        ({"halting_epsilon": 1e-8}, "1e-6 or more"),
    ],
)
def test_what_it_refuses(changes, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **changes)
