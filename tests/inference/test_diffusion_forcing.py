"""Diffusion forcing: its limits are static and adaptive decoding, and it is what plain lists compute."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from dreamer_jax.blocks.memory import Context
from dreamer_jax.families import build
from dreamer_jax.inference import Adaptive, DiffusionForcing, Engine, FoldedModel, Sampling, Static, engine, fold
from dreamer_jax.inference.programs import programs_for
from dreamer_jax.inference.samplers.contract import Asked, Progress
from dreamer_jax.inference.samplers.wavefront import fillers, mixed, noise_share
from tests.families import test_algoformer, test_huginn
from tests.families.cases import drawn_params
from tests.families.test_huginn import plain_norm
from tests.inference.test_shared_slots import Plain

NEW, ROWS, LONGEST = 8, 3, 8
WITHOUT_SHRINKING = {"database": None, "phases": (Phase.generate,)}
"""A smaller failing case would take minutes to find."""
SMALL = dataclasses.replace(
    test_huginn.FORMS["huginn"], vocab_size=23, core_layers=1, cache="compress-s1", dtype="float64"
)


@pytest.fixture(scope="module", autouse=True)
def wide():
    """Float64, where a product's order decides nothing; one batch in one thread, so that each program is compiled
    once."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(engine, "_cores", lambda: 1)
        yield


@functools.cache
def model_of(config=SMALL, seed: int = 0) -> FoldedModel:
    """Four depths."""
    return fold(config, test_huginn.drawn_params(config, seed), {})


def another(model: FoldedModel, seed: int) -> FoldedModel:
    """The same model with every parameter moved at random; no program is compiled for it."""
    rng = np.random.default_rng(seed)
    return model.replace(
        params=jax.tree.map(lambda x: (x * (1 + 0.3 * rng.normal(size=x.shape))).astype(x.dtype), model.params)
    )


# The limits: one position at a time.

ALONE = DiffusionForcing(4, exit="fixed")
"""r' = r: with the fixed exit a position is alone."""
PROMPTS = st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=LONGEST), min_size=ROWS, max_size=ROWS)


def adaptive_and_its_like(data) -> tuple[Adaptive, DiffusionForcing]:
    """Both look every r' recurrences."""
    inner, threshold = data.draw(st.sampled_from([2, 1])), data.draw(st.floats(0.4, 1.2))
    momentum = data.draw(st.floats(0, 0.9))
    return Adaptive("latent-diff", threshold, inner, inner), DiffusionForcing(
        inner, 1, threshold=threshold, momentum=momentum
    )


def compare(data, base: FoldedModel, limit: str, sampling: Sampling | None = None) -> list[int]:
    """A random model, prompts and stop token: texts and depths are those of the other sampler. Returns the depths."""
    model = another(base, data.draw(st.integers(0, 10_000), label="model"))
    prompts = data.draw(PROMPTS, label="prompts")
    stop = [data.draw(st.integers(0, 22), label="stop")]
    one, other = (Static(), ALONE) if limit == "static" else adaptive_and_its_like(data)
    wanted, found = (Engine(model, its).generate(prompts, NEW, sampling, stop) for its in (one, other))
    for field in ("tokens", "depths", "finish", "steps"):
        assert [getattr(row, field) for row in found] == [getattr(row, field) for row in wanted]
    return [depth for row in found for depth in row.depths[1:]]


@pytest.mark.slow_but("static")
@pytest.mark.parametrize("limit", ["static", "adaptive"])
def test_one_position_at_a_time_is_plain_decoding(limit):
    """r' = r with the fixed exit takes all depths; a wavefront of 1 stops where the adaptive sampler does."""
    depths = []

    @settings(max_examples=5, **WITHOUT_SHRINKING)
    @given(st.data())
    def examples(data):
        depths.extend(compare(data, model_of(), limit))

    examples()
    assert set(depths) == {4} if limit == "static" else len(set(depths)) > 1


@pytest.mark.slow  # forty examples of models of several forms and rules of the cache, each with programs of its own
@pytest.mark.parametrize("limit", ["static", "adaptive"])
@pytest.mark.parametrize("cache", ["latest", "full", "always-last", "compress-s2", "compress-s4"])
def test_one_position_at_a_time_is_plain_decoding_in_many_cases(limit, cache):
    """Also drawn with the same seed."""
    form = "llama" if cache == "latest" else "huginn"
    base = model_of(dataclasses.replace(test_huginn.FORMS[form], vocab_size=23, cache=cache, dtype="float64"))

    @settings(max_examples=20, **WITHOUT_SHRINKING)
    @given(st.data())
    def examples(data):
        drawn = data.draw(st.booleans(), label="drawn")
        sampling = Sampling(data.draw(st.floats(0.2, 2.0)), seed=data.draw(st.integers(0, 99))) if drawn else None
        compare(data, base, limit, sampling)

    examples()


# The algorithm, with lists.


class Lane:
    """A position in flight: its token, state, input, recurrences, and for exits its prediction and what changed."""

    def __init__(self, token, state):
        self.token, self.z, self.e, self.count = token, state, None, 0
        self.before = self.predicted = self.velocity = None
        self.times = self.acceleration = 0


class PlainForcing(Plain):
    """Algorithm 2 of Geiping et al. (2025b), one row and one position after the other, float64."""

    def __init__(self, config, params, start, number):
        super().__init__(config, params, config.cache)
        self.start, self.number = start, number

    def prelude(self, token, place):
        e = self.params["embedding"][token] * self.config.hidden_size**0.5
        for j, layer in self.params["prelude"].items():
            e = self.layer(layer, e, place, ("prelude", j), 0)
        return e

    def recur(self, s, e, place, l):
        s = np.concatenate([s, e]) @ self.params["adapter"]
        for j, layer in self.params["core"].items():
            s = self.layer(layer, s, place, ("core", j), l)
        return s

    def predict(self, s, place):
        x = plain_norm(self.config, s, self.params["final_norm"])
        for j, layer in self.params["coda"].items():
            x = self.layer(layer, x, place, ("coda", j), 0)
        return int(np.argmax(plain_norm(self.config, x, self.params["final_norm"]) @ self.params["embedding"].T))

    def generate(self, prompt, new, its, total):
        """(tokens, recurrences of their predecessors, iterations)."""
        text = list(prompt)
        depths, first, known, iterations = [], 0, len(prompt) - 1, 0
        at_once = len(prompt) if its.prefill else its.wavefront
        lanes = [Lane(token, self.start(place)) for place, token in enumerate(prompt[:at_once])]
        if its.prefill:
            for place, lane in enumerate(lanes):
                lane.e = self.prelude(lane.token, place)
            for l in range(total):
                for place, lane in enumerate(lanes):
                    lane.z = self.recur(lane.z, lane.e, place, l)
            predictions = [self.predict(lane.z, place) for place, lane in enumerate(lanes)]
            text, depths, first, known = [*text, predictions[-1]], [total], len(prompt), len(prompt)
            lanes = [Lane(predictions[-1], self.start(first))]
        alone = 0
        while known < len(prompt) + new - 1:
            self.refine(lanes, first, its, total)
            iterations, alone = iterations + 1, alone + its.inner_recurrences
            leaving = 0
            for i, lane in enumerate(lanes):
                fixed = first + i <= known or lane.token == lanes[i - 1].predicted
                if not fixed or not (self.settled(lane, its, total) or (i == 0 and alone >= total)):
                    break
                leaving += 1
            for i, lane in enumerate(lanes[:leaving]):
                if first + i >= known:
                    text.append(lane.predicted)
                    depths.append(lane.count)
            for i in range(1, len(lanes)):
                if first + i > known:
                    lanes[i].token = lanes[i - 1].predicted
            newest = lanes[-its.headway :] if its.continuous and len(lanes) >= its.headway else []
            guess, end = lanes[-1].predicted, first + len(lanes)
            lanes, first, known = lanes[leaving:], first + leaving, max(known, first + leaving)
            alone = 0 if leaving else alone
            wanted = max(its.headway, known + 1 - end)
            for n in range(min(wanted, its.wavefront - len(lanes), len(prompt) + new - 1 - end)):
                token = guess if n == 0 else self.filler(end + n, its)
                token = text[end + n] if end + n <= known else token
                lanes.append(Lane(token, newest[n].z if newest else self.start(end + n)))
        return text[len(prompt) :][:new], depths[:new], iterations

    def refine(self, lanes, first, its, total):
        for i, lane in enumerate(lanes):
            p = self.prelude(lane.token, first + i)
            lane.e = p if lane.e is None else its.momentum * lane.e + (1 - its.momentum) * p
            lane.before = lane.z
            share = 1 - lane.count / total if its.noise_schedule == "linear" else 1 / (1 + lane.count)
            lane.z = (1 - its.noise * max(share, 0)) * lane.z  # random states are zero where noise is tried
        for _ in range(its.inner_recurrences):
            for i, lane in enumerate(lanes):
                lane.z, lane.count = self.recur(lane.z, lane.e, first + i, lane.count), lane.count + 1
        for i, lane in enumerate(lanes):
            predicted = self.predict(lane.z, first + i)
            velocity = lane.z - lane.before
            lane.times = lane.times + 1 if predicted == lane.predicted else 0
            lane.acceleration = np.inf if lane.velocity is None else np.linalg.norm(velocity - lane.velocity)
            lane.predicted, lane.velocity = predicted, velocity

    @staticmethod
    def settled(lane, its, total):
        size = np.linalg.norm(lane.z)
        return {
            "latent-diff": np.linalg.norm(lane.velocity) < its.threshold * size,
            "latent-acceleration": lane.acceleration < its.threshold * size,
            "token-stability": lane.times > its.threshold,
            "fixed": lane.count >= total,
        }[its.exit]

    def filler(self, place, its):
        where = jnp.zeros(1, jnp.int32)
        asked = Asked(jnp.int32(1), jnp.array([-1]), Sampling().numbers(), ())
        progress = Progress(where, where, where > 0, where + self.number, where, where)
        return int(fillers(its.headway, asked, progress, jnp.full((1, 1), place), self.config.vocab_size)[0, 0])


FORCING = DiffusionForcing(1, 4, threshold=0.25)
SILENT = dataclasses.replace(SMALL, state_std=1e-30)
"""Its random states are as good as zero, so that noise takes away a share of a state and adds nothing."""
CASES = {
    "latent-diff": [
        dataclasses.replace(FORCING, threshold=0.9),  # states settle whose tokens still change
        FORCING,
        dataclasses.replace(FORCING, inner_recurrences=2, momentum=0.6),
    ],
    "token-stability": [DiffusionForcing(1, 6, 2, "token-stability", 1, continuous=True)],
    "unprefilled": [dataclasses.replace(FORCING, exit="latent-acceleration", threshold=0.4, prefill=False)],
    "noise": [
        dataclasses.replace(FORCING, exit="fixed", noise=0.4, wavefront=3),
        dataclasses.replace(FORCING, exit="fixed", noise=0.4, wavefront=3, inner_recurrences=2),
    ],
}


@pytest.mark.slow_but("latent-diff", "unprefilled")
@pytest.mark.parametrize("case", CASES)
def test_the_algorithm(case):
    """Texts, recurrences and iterations of three rows, of random models whose texts vary."""
    config = SILENT if case == "noise" else SMALL
    differs = 0
    for seed, sampler in enumerate(CASES[case]):
        model = another(model_of(config), seed)
        family, params = model.family, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)

        def start(place, family=family):
            at = jnp.array([[place]])
            return np.asarray(family.start(jnp.zeros((1, 1, 16)), Context(at, at)))[0, 0]

        prompts = [[1, 2, 3], [4], [5, 9, 14, 2, 8]]
        rows = Engine(model, sampler).generate(prompts, NEW)
        its = Engine(model, sampler).sampler
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            plain = PlainForcing(config, params, start, number)
            tokens, depths, iterations = plain.generate(prompt, NEW, its, 4)
            assert row.tokens == tokens
            assert row.depths == depths
            assert row.steps == iterations * its.inner_recurrences
        static = Engine(model).generate(prompts, NEW)
        differs += [row.tokens for row in rows] != [row.tokens for row in static]
    assert differs  # so tokens were guessed that changed


def test_blocks_and_numbers_change_nothing_compiled():
    """In blocks of one token rows wait for one another; each comes to the same in the same number of steps."""
    programs, prompts = programs_for(None).decode, [[1, 2, 3], [4], [5, 9, 14, 2, 8]]
    model = another(model_of(), 2)
    rows = Engine(model, FORCING).generate(prompts, NEW)
    size = programs._cache_size()
    *_, in_blocks = Engine(model, FORCING).stream(prompts, NEW, block=1)
    assert [dataclasses.astuple(row) for row in in_blocks] == [dataclasses.astuple(row) for row in rows]
    changed = dataclasses.replace(FORCING, inner_recurrences=2, threshold=0.5, momentum=0.3, init_scale=0.5)
    others = Engine(model, changed).generate(prompts, NEW)
    assert [row.steps for row in others] != [row.steps for row in rows]
    assert programs._cache_size() == size


@pytest.mark.slow  # programs of its own
def test_a_mesh_changes_nothing():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    prompts = [[1, 2, 3], [4], [5] * 7, [9, 2]]
    noisy = dataclasses.replace(FORCING, noise=0.3, headway=2, wavefront=12)
    alone, spread = (Engine(another(model_of(), 1), noisy, its).generate(prompts, NEW) for its in (None, mesh))
    assert [dataclasses.astuple(row) for row in spread] == [dataclasses.astuple(row) for row in alone]


def test_noise():
    """beta_s falls linearly to nothing, or as 1 / (1 + s), and is the share of noise in a state (Eq. 2); states are
    drawn with the keys they are given."""
    counts = jnp.array([[0, 2, 8, 12]])
    np.testing.assert_allclose(noise_share("linear", 0.4, counts, 8), [[0.4, 0.3, 0, 0]])
    np.testing.assert_allclose(noise_share("harmonic", 0.4, counts, 8), [[0.4, 0.4 / 3, 0.4 / 9, 0.4 / 13]])
    found = mixed(jnp.full((1, 4, 2), 10.0), jnp.full((1, 4, 2), -1.0), noise_share("linear", 0.4, counts, 8))
    np.testing.assert_allclose(found[0, :, 0], [5.6, 6.7, 10, 10], rtol=1e-6)
    keys = jax.random.split(jax.random.key(3), 4).reshape(2, 2)
    family, places = build(SMALL), jnp.zeros((2, 2), jnp.int32)
    states = FoldedModel({}, {}, family, 4).random_state(jnp.zeros((2, 2, 16)), places, keys, jnp.asarray(0.5))
    assert len(np.unique(np.asarray(states)[..., 0])) == 4
    for row, lane in np.ndindex(2, 2):
        context = Context(places[:1, :1], places[:1, :1], keys=keys[row, lane : lane + 1])
        np.testing.assert_array_equal(states[row, lane], family.start(jnp.zeros((1, 1, 16)), context, 0.5)[0, 0])


@pytest.mark.slow  # programs of another family
def test_another_family_with_injected_inputs():
    """Loops of an AlgoFormer that adds its input, alone and together."""
    config = dataclasses.replace(test_algoformer.TINY, inject="add", dtype="float64")
    model = fold(config, drawn_params(config), {})
    prompts = [[1, 2, 3], [4], [5, 9, 14, 2, 8]]
    alone = DiffusionForcing(model.total_depth, exit="fixed")
    rows, static, wave = (Engine(model, its).generate(prompts, NEW) for its in (alone, None, FORCING))
    assert [row.tokens for row in rows] == [row.tokens for row in static]
    assert sum(row.steps for row in wave) < sum(row.steps for row in static)
