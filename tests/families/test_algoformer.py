"""AlgoFormer against a plain float64 version of its equations, its limits, decoding and counting."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.memory import Context
from dreamer_jax.budget import memory, program
from dreamer_jax.config.models.algoformer import AlgoformerConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build, depth_of, forward
from dreamer_jax.inference import Engine, fold
from tests.families.cases import drawn_params, logits_in_flight
from tests.families.plain_ouro import PlainOuro, wide

TINY = AlgoformerConfig(
    depth=3,
    pre_layers=1,
    loop_layers=2,
    post_layers=1,
    scored=2,
    hidden_size=16,
    heads=2,
    head_size=6,
    mlp_size=12,
    vocab_size=23,
    dtype="float32",
)
FORMS = {
    "all": TINY,
    "sampled": dataclasses.replace(TINY, score="sampled"),
    "added": dataclasses.replace(TINY, inject="add"),
    "bare": dataclasses.replace(TINY, pre_layers=0, post_layers=0, inject="add", scored=1),
}
RNG = np.random.default_rng(0)
TOKENS, TARGETS = (RNG.integers(0, 23, (2, 7)).astype(np.int32) for _ in range(2))
MASK = RNG.random((2, 7)) < 0.7
BATCH = {"tokens": TOKENS, "targets": TARGETS, "loss_mask": MASK}


@functools.cache
def passing(config):
    """params, loops -> (loss, logits after the last loop) and the gradient, as training goes so deep."""
    family = build(config)

    def loss(params, loops):
        drawn = family.draw(jax.random.key(0), jnp.int32(0), 2)
        passed = forward(family, params, {}, BATCH, drawn._replace(depth=loops))
        value, _ = family.loss(params, passed, BATCH)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return value, family.logits(params, hidden)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


class PlainAlgoformer(PlainOuro):
    """Attention, norms and rotations of the plain Ouro, whose keys and values have a place for every layer and loop."""

    def __init__(self, config: Any, params: Any):
        super().__init__(config, params)
        self.config = type("Sizes", (), {**dataclasses.asdict(config), "kv_heads": config.heads})

    def logits(self, tokens: Any, loops: int) -> Any:
        """[S, V], after so many loops."""
        out = []
        for position, token in enumerate(tokens):
            e = self.stack("pre", self.params["embedding"][token], position, 0)
            x = np.zeros_like(e) if self.config.inject == "add" else e
            for t in range(loops):
                x = self.stack("loop", x + e if self.config.inject == "add" else x, position, t)
            y = self.norm(self.stack("post", x, position, 0), {"scale": self.params["final_norm"]})
            out.append(self.params["embedding"] @ y)
        return np.stack(out)

    def stack(self, name: str, x: Any, position: int, t: int) -> Any:
        for j, layer in sorted(self.params.get(name, {}).items()):
            x = x + self.attention(
                layer["attention"], self.norm(x, layer["attention_norm"]), position, (t, f"{name}{j}")
            )
            normed = self.norm(x, layer["mlp_norm"])
            gate, up = (layer["feed_forward"][name] @ normed for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["feed_forward"]["out"]
        return x

    def of(self, place: Any, position: int, own: bool) -> Any:
        """Every layer of every loop has keys of its own."""
        return self.kept[place][position]


@functools.cache
def plain_logits(config, loops):
    params = wide(drawn_params(config))
    return np.stack([PlainAlgoformer(config, params).logits(tokens, loops) for tokens in TOKENS])


def plain_loss(logits):
    picked = np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    return ((np.log(np.exp(logits).sum(-1)) - picked) * MASK).sum()


@pytest.mark.slow_but("added", "all")
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_loss_are_those_of_the_equations(form):
    """All: the mean after the last two of three loops. Sampled: after the loop that was drawn."""
    config = FORMS[form]
    for loops in (3,) if form != "sampled" else (2, 3):
        (loss, logits), _ = passing(config)(drawn_params(config), jnp.int32(loops))
        np.testing.assert_allclose(logits, plain_logits(config, loops), atol=1e-4)
        scored = (loops,) if config.scored == 1 or form == "sampled" else (2, 3)
        wanted = np.mean([plain_loss(plain_logits(config, t)) for t in scored])
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def unrolled(config, first=0):
    """The mean of the last losses, by plain reverse mode through a Python loop; the loops before `first` are cut."""
    family = build(config)

    def loss(params):
        context = Context(jnp.ones((2, 7), jnp.int32), jnp.broadcast_to(jnp.arange(7), (2, 7)))
        memory = family.fresh(2, 7, config.depth)
        e, memory = family.enter(params, BATCH, memory, context)
        state, losses = family.start(e, context), []
        for t in range(config.depth):
            if t == first:
                state = jax.lax.stop_gradient(state)
            inputs, depth = family.inputs(e), depth_of(t, config.depth)
            state = family.step(family.weights(params), state, inputs, depth, memory, context).state
            hidden, _ = family.readout(params, state, memory, context)
            scores = jax.nn.log_softmax(hidden @ params["embedding"].T)
            losses.append(-jnp.sum(jnp.take_along_axis(scores, TARGETS[..., None], -1)[..., 0] * MASK))
        return sum(losses[-config.scored :]) / config.scored

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow_but("all", "added")
@pytest.mark.parametrize(
    ("config", "first"),
    [(FORMS["all"], -1), (FORMS["added"], -1), (dataclasses.replace(FORMS["added"], truncate=True), 1)],
    ids=["all", "added", "truncated"],
)
def test_gradients_are_those_of_the_unrolled_loops(config, first):
    """Truncated, nothing goes back through the loops before the scored ones; Pre is trained through the others."""
    params = drawn_params(config)
    value, wanted = unrolled(config, first)(params)
    (loss, _), found = passing(config)(params, jnp.int32(config.depth))
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-5), found, wanted)
    assert np.any(found["pre"]["0"]["attention"]["qkv"])


@pytest.mark.slow
def test_limits():
    """One loop is a stack of untied layers; the number of loops is no parameter; with one loss it is that after T."""
    once = dataclasses.replace(TINY, depth=1, scored=1)
    params = drawn_params(TINY)
    stack = dataclasses.replace(TINY, depth=1, scored=1, pre_layers=2, loop_layers=1, post_layers=1)
    untied = params | {"pre": {"0": params["pre"]["0"], "1": params["loop"]["0"]}, "loop": {"0": params["loop"]["1"]}}
    (_, logits), _ = passing(once)(params, jnp.int32(1))
    (_, as_stack), _ = passing(stack)(untied, jnp.int32(1))
    np.testing.assert_allclose(logits, as_stack, atol=1e-5)
    deeper = dataclasses.replace(TINY, depth=30)
    assert jax.tree.map(np.shape, drawn_params(deeper)) == jax.tree.map(np.shape, params)


def test_sampling_is_unbiased():
    """Every scored loop is drawn, equally often, and no other."""
    family = build(dataclasses.replace(TINY, depth=9, scored=4, score="sampled"))
    keys = jax.random.split(jax.random.key(0), 4000)
    depths = np.asarray(jax.vmap(lambda key: family.draw(key, jnp.int32(0), 2).depth)(keys))
    loops, counts = np.unique(depths, return_counts=True)
    np.testing.assert_array_equal(loops, [6, 7, 8, 9])
    assert np.abs(counts / 4000 - 0.25).max() < 0.03
    assert family.draw(keys[0], jnp.int32(0), 2).slots == 9


def test_decoding_is_the_whole_pass():
    """Greedy tokens through the caches are the likeliest of the whole pass; positions at depths of their own."""
    config = FORMS["added"]
    model = fold(config, drawn_params(config), {})

    @jax.jit
    def whole(tokens):
        its = forward(model.family, model.params, {}, {"tokens": tokens})
        return model.logits(model.family.readout(model.params, its.state, its.memory, its.context)[0])

    prompts = [[1, 5, 6], [2, 7, 8, 9, 11]]
    for prompt, row in zip(prompts, Engine(model).generate(prompts, 5), strict=True):
        tokens = np.zeros((1, 10), np.int32)
        tokens[0, : len(prompt) + 5] = prompt + row.tokens
        likeliest = np.asarray(whole(tokens)[0].argmax(-1))
        assert row.tokens == likeliest[len(prompt) - 1 : len(prompt) + 4].tolist()
    places = jnp.broadcast_to(jnp.arange(7), (2, 7))
    found = logits_in_flight(model, TOKENS, places, model.empty_slots(2, 7))
    np.testing.assert_allclose(found, plain_logits(config, 3), atol=1e-4)


def test_both_counters_agree():
    config = dataclasses.replace(TINY, depth=5, mlp_size=40)
    found = program.count(config, 24)
    assert found == program.expected(config, 24)
    layer = 4 * 16 * 12 + 3 * 16 * 40 + 2 * 16
    assert found.parameters == 23 * 16 + 4 * layer + 16
    kept = 2 * 2 * 6 * 2 * 10
    assert memory.caches(build(config), 10) == {"pre cache": kept, "loop cache": 2 * 5 * kept, "post cache": kept}


@pytest.mark.parametrize(
    ("change", "said"),
    [({"scored": 4}, "model.depth is 3"), ({"head_size": 7}, "7 is odd"), ({"loop_layers": 0}, "too small")],
)
def test_settings_that_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **change)
