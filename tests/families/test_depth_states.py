"""Depth attention as a state of one size: NumPy, plain autodiff, limit cases, decoding, memory, budgets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.collection import make_observer
from dreamer_jax.blocks.depth_states import Carried, GatedDelta, GatedRecurrent
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import Drawn, build, depth_of
from dreamer_jax.inference.engine import Engine
from dreamer_jax.parallel import make_mesh
from tests.families.cases import (
    PACKED,
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    apply,
    cross_entropy,
    flying,
    jitted_forward,
    passed_whole,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward
from tests.families.test_gradients import assert_same, model_loss

SMALL: dict[str, Any] = {"depth": 4, "da_heads": 2, "da_kv_heads": 1, "hidden_size": 12, "num_experts": 4}
FORMS = {
    "delta": small_config("DR+DA", **SMALL, da_form="gated_delta"),
    "recurrent": small_config("DR+DA", **SMALL, da_form="gated_recurrent"),
}


@pytest.mark.parametrize("name", [*FORMS, "layered", "two heads"])
def test_equal_to_numpy(name):
    """Packed rows, at the trained depth and a shallower one; the softmax comes to something else."""
    config = FORMS.get(name) or small_config(
        **{"layered": {"variant": "LA+DA"}, "two heads": {"da_kv_heads": 2, "da_heads": 2}}[name], da_form="gated_delta"
    )
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (config.depth, 2):
        expected = forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > 5e-6, "near tie: choose another seed"
        found = jitted_forward(config)(params, bias, tokens, *PACKED, depth)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < 1e-5


def unrolled_loss(params, bias, config):
    """The loss by a plain Python loop under plain autodiff."""
    tokens = jnp.asarray(random_tokens(config))
    context = Context(jnp.asarray(SEGMENT_IDS), jnp.asarray(POSITIONS), {"balancing": bias})
    family = build(config, REFERENCE)
    state = family.start(params["embedding"][tokens], context)
    weights, empty = family.weights(params), family.fresh(*tokens.shape, config.depth)
    for l in range(config.depth):
        state = family.step(weights, state, (), depth_of(l, config.depth), empty, context).state
    logits = family.stream(state) @ params["head"].T
    return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), jnp.asarray(REAL))


@pytest.mark.slow_but("attention-delta")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("remat", ["attention", "full", "none"])
def test_gradients_are_those_of_an_unrolled_loop(name, remat):
    config = FORMS[name]
    loss = functools.partial(model_loss, config=config, remat=remat)
    found = jax.jit(jax.value_and_grad(loss))(*random_weights(config))
    expected = jax.jit(jax.value_and_grad(functools.partial(unrolled_loss, config=config)))(*random_weights(config))
    assert_same(found, expected)


@pytest.mark.parametrize("form", ["gated_delta", "gated_recurrent"])
def test_layers_of_their_own_decode(form):
    """Their gates are stacked: a row for every position in flight, and one for all where rows are scored."""
    config = small_config("LA+DA", **SMALL, da_form=form)
    model, found = flying(config)
    whole, tokens = passed_whole(config), random_tokens(config, 1, (2, 6))
    assert relative_error(found, whole) < 1e-5
    logprobs = np.take_along_axis(np.asarray(jax.nn.log_softmax(whole))[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    scored = np.stack([its.logprobs for its in Engine(model).score(tokens.tolist())])
    np.testing.assert_allclose(scored, logprobs, atol=1e-5)


@pytest.mark.slow_but("None-delta", "6-recurrent")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("depth", [None, 6])
def test_decoding_carries_the_state(name, depth):
    """Every position in flight at a depth of its own, without a cache of depths, against a full pass."""
    config = FORMS[name]
    model, found = flying(config, depth)
    assert model.family.flight(2, 6, model.total_depth) is None
    assert relative_error(found, passed_whole(config, depth)) < 1e-5


def _as_model(config: Any) -> Any:
    params, bias = random_weights(config)
    return params, {"balancing": bias}


@pytest.mark.slow
def test_rows_with_depths_of_their_own():
    """A row of two depths beside one of four comes to what it comes to alone."""
    config = FORMS["delta"]
    params, bias = jax.tree.map(jnp.asarray, random_weights(config))
    tokens = random_tokens(config, 2, (2, 6))
    ones, places = np.ones_like(tokens), np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    both = jax.jit(lambda: apply(config, params, bias, tokens, ones, places, Drawn(jnp.array([2, 4]), 4)).logits)()
    for row, depth in enumerate((2, 4)):
        alone = apply(config, params, bias, jnp.asarray(tokens[row : row + 1]), depth=depth).logits
        assert relative_error(both[row], alone[0]) < 1e-5


def block(kind: Any, **sizes: Any) -> Any:
    return kind(REFERENCE, 6, 1, 1, 4, None, 0.5, 0.5, parent=None, **sizes)


def advance(its: Any, weights: Any, x: np.ndarray, qkv: np.ndarray, state: Any) -> Any:
    def method(module, x, qkv, state):
        return module.advance(x, qkv, Depth(jnp.int32(0), jnp.int32(1)), state)

    return its.apply({"params": weights}, jnp.asarray(x), jnp.asarray(qkv), state, method=method)


def test_a_delta_state_recalls_what_stood_at_a_key():
    """With all kept and all taken (a = b = 1): orthogonal keys keep their values, the same key's is replaced."""
    its = block(GatedDelta)
    gates = np.zeros((6, 2), np.float32)
    gates[0, 1] = 100.0  # sigmoid: 1
    weights = {"gates": gates, "fall": np.full(1, -100.0), "rate": np.zeros(1)}
    x, state = np.eye(1, 6, dtype=np.float32), jnp.zeros((1, 1, 4, 4))
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for key, value in zip((0, 1, 0), values, strict=True):
        unit = np.eye(4, dtype=np.float32)[key]
        _, state = advance(its, weights, x, np.concatenate([unit, 3 * unit, value])[None], state)
    for key, value in ((0, values[2]), (1, values[1]), (2, 0 * values[0])):
        unit = 2 * np.eye(4, dtype=np.float32)[key]
        read, _ = advance(its, weights | {"gates": 0 * gates - 1e3}, x, np.concatenate([unit, unit, unit])[None], state)
        np.testing.assert_allclose(read[0, 0], value, atol=1e-4)


def test_a_gated_unit_that_takes_all_is_the_present_value():
    its = block(GatedRecurrent)
    weights = {"gates": np.zeros((6, 4), np.float32), "offset": np.full(4, 50.0, np.float32)}
    q, v = np.full(4, 50.0, np.float32), np.arange(4, dtype=np.float32)
    read, state = advance(
        its, weights, np.ones((1, 6), np.float32), np.concatenate([q, v])[None], jnp.full((1, 1, 4), 9.0)
    )
    np.testing.assert_allclose(read[0, 0], v, atol=1e-5)
    weights["offset"] = -weights["offset"]
    _, state = advance(
        its, weights, np.ones((1, 6), np.float32), np.concatenate([q, v])[None], jnp.full((1, 1, 4), 9.0)
    )
    np.testing.assert_allclose(state, 9.0)


@pytest.mark.slow
def test_a_state_grows_with_neither_depth_nor_length():
    """And a gradient's memory by one state a depth: compiled at depth 16 and 32."""
    for name, numbers in (("delta", 8 * 8), ("recurrent", 8)):
        config = FORMS[name]
        family = build(config)
        kept = family.start(jnp.zeros((2, 3, 12)), None)
        assert isinstance(kept, Carried) and kept.depths.size == 2 * 3 * numbers
        assert memory.caches(family, 9)["DA cache"] == numbers * 4
        assert family.state_elements() == 12 + numbers
    sizes = {}
    for depth in (16, 32, 64):
        config = small_config("DR+DA", depth=depth, da_form="gated_delta")
        shapes = jax.eval_shape(lambda config=config: build(config).init(jax.random.key(0)))
        params, state = jax.tree.map(lambda leaf: leaf, shapes, is_leaf=lambda leaf: hasattr(leaf, "unbox"))
        params = jax.tree.map(lambda box: box.unbox(), params, is_leaf=lambda leaf: hasattr(leaf, "unbox"))
        tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)

        def loss(params, bias, tokens, config=config):
            return apply(config, params, bias, tokens).logits.mean()

        compiled = jax.jit(jax.grad(loss)).lower(params, state["balancing"], tokens).compile()
        sizes[depth] = compiled.memory_analysis().temp_size_in_bytes
    per_depth = [(sizes[32] - sizes[16]) / 16, (sizes[64] - sizes[32]) / 32]
    assert max(per_depth) <= 1.25 * min(per_depth)
    config = small_config("DR+DA", da_form="gated_delta")
    one = 16 * 32 * 4 * build(config).state_elements()
    assert min(per_depth) >= one and max(per_depth) <= 3 * one


@pytest.mark.parametrize("name", FORMS)
def test_the_program_has_what_is_counted(name):
    assert program.count(FORMS[name], 6) == program.expected(FORMS[name], 6)
    plain = build(small_config("DR+DA", **SMALL))
    assert analytic.matmul_flops(build(FORMS[name]), 9)["DA"] != analytic.matmul_flops(plain, 9)["DA"]


def test_analysis_has_no_map_of_depths():
    """There are no scores over depths; all else is there."""
    config = FORMS["delta"]
    params, bias = random_weights(config)
    mask = SEGMENT_IDS > 0
    batch = {"tokens": random_tokens(config), "targets": random_tokens(config, 1), "segment_ids": SEGMENT_IDS}
    batch |= {"positions": POSITIONS, "loss_mask": mask, "answer_mask": mask}
    seen = make_observer(config, make_mesh(MeshConfig(data=(1,))))(params, {"balancing": bias}, batch)
    assert "depth_scores" not in seen and "depth_attention" in seen["counts"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"variant": "DR", "da_form": "gated_delta"}, "model.da_form: gated_delta is for depth attention; DR has none"),
        (
            {"da_form": "gated_delta", "da_window": 2},
            "model.da_window: 2 is for softmax; with model.da_form gated_delta",
        ),
        ({"da_form": "gated_recurrent", "da_dilation": 2}, "model.da_dilation: 2 is for softmax"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, line):
    with pytest.raises(ConfigError) as caught:
        small_config(**{"variant": "DR+DA", **SMALL, **changes})
    assert str(caught.value).startswith(line)


def test_a_summary_says_so():
    assert FORMS["delta"].summary.endswith(", depth attention as a gated_delta state")
