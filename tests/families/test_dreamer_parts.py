"""What sections 3.5 and 3.7 add to depth recurrence, each left out by a setting: NumPy, limit cases, and decoding."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.injection import DiagonalInjection
from dreamer_jax.blocks.parameters import DECAYED
from dreamer_jax.blocks.projections import ProjectionTapes
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from dreamer_jax.inference import Flight, fold
from pallas_kernels.attention_moe import LinearTape
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    cross_entropy,
    jitted_forward,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.cases import apply as full_pass
from tests.families.numpy_reference import forward
from tests.families.test_gradients import assert_same, static_depth_gradient, unrolled_gradient

TOLERANCE = 1e-5
SAFE_MARGIN = 5e-6
WITHOUT = {
    "attention_experts": small_config("DR+DA", attention_experts=False),
    "shared_expert": small_config("DR+DA", shared_expert=False),
    "residual_norm": small_config("DR+DA", residual_norm=False),
    "router_depth_code": small_config("DR", router_depth_code=False),
}
WITH = {
    "scaled": small_config("DR+DA", residual_scale="depth"),
    "scaled, in layers": small_config("LA", residual_scale="depth"),
    "injected": small_config("DR+DA", injection="diagonal"),
    "slots": small_config("DR+DA", pa_slots=5, pa_heads=2, pa_head_size=8),
    "slots, in layers, in a row": small_config("LA", pa_slots=3, pa_head_size=4, mixing="sequential"),
    "both, a plain sum": small_config("DR", injection="diagonal", residual_scale="depth", residual_norm=False),
}
PACKED = (SEGMENT_IDS, POSITIONS)


def paths(config: DreamerConfig) -> dict[str, tuple[int, ...]]:
    """Path of every parameter, its keys joined by dots, -> its shape."""
    params, _ = random_weights(config)
    return {".".join(key.key for key in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.parametrize("name", [*WITHOUT, *WITH])
def test_without_and_with_a_part_the_model_agrees_with_numpy(name):
    """Packed rows, at the trained depth and a shallower one."""
    config = {**WITHOUT, **WITH}[name]
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (3, 2):
        found = jitted_forward(config)(params, bias, tokens, *PACKED, depth)
        expected = forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > SAFE_MARGIN, "near tie: choose another seed"
        assert set(found.counts) == set(expected.counts)
        for router, counts in expected.counts.items():
            np.testing.assert_array_equal(found.counts[router][:depth], counts, err_msg=router)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < TOLERANCE


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_left_out_is_said(name):
    assert WITHOUT[name].summary.endswith(f"2 active, no {name}")


def test_what_is_left_out_is_not_a_parameter():
    whole, dr = paths(small_config("DR+DA")), paths(small_config("DR"))
    attentions = [f"layer.{kind}_attention.projections." for kind in ("sequence", "depth")]
    shared = {f"{place}{matrix}_shared" for place in attentions for matrix in ("qkv", "out")}
    routers = {path for path in whole if ".projections.router." in path}
    assert set(paths(WITHOUT["shared_expert"])) == set(whole) - shared
    reused = paths(WITHOUT["attention_experts"])
    assert len(routers) == 8 and set(reused) == set(whole) - shared - routers
    for place in attentions:
        assert all(reused[place + matrix] == whole[place + matrix][1:] for matrix in ("qkv", "out"))
    plain_sum = paths(WITHOUT["residual_norm"])
    assert set(plain_sum) == set(whole) - {"layer.residual_norm.scale"} | {"final_norm.scale"}
    assert paths(WITHOUT["router_depth_code"]) == dr
    assert set(random_weights(WITHOUT["attention_experts"])[1]) == {"expert_attention"}


@pytest.mark.slow
def test_no_shared_expert_is_a_shared_expert_of_zeros():
    """Logits, and the gradients of all that both have, scores' included."""
    without, whole = WITHOUT["shared_expert"], small_config("DR+DA")
    params, bias = random_weights(without)
    zeros = {path: jnp.zeros(shape) for path, shape in paths(whole).items() if path.endswith("_shared")}
    padded = jax.tree.map(jnp.asarray, params)
    for path, value in zeros.items():
        *scope, last = path.split(".")
        node = padded
        for key in scope:
            node = node[key]
        node[last] = value
    tokens, targets = random_tokens(whole), random_tokens(whole, 1)

    def gradient(config, params):
        def loss(params):
            logits = full_pass(config, params, bias, tokens, *PACKED).logits
            return cross_entropy(logits, targets, jnp.asarray(REAL))

        return jax.jit(jax.value_and_grad(loss))(params)

    (expected, wanted), (found, got) = gradient(whole, padded), gradient(without, params)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    flat = dict(jax.tree_util.tree_leaves_with_path(wanted))
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        assert relative_error(leaf, flat[path]) < 1e-5, jax.tree_util.keystr(path)


def test_a_tape_without_a_shared_expert_has_no_gradient_for_it():
    tapes = [LinearTape(jnp.full((3, 2, 2), value)) for value in (1.0, 2.0)]
    with_shared = ProjectionTapes(*tapes, shared=True).gradients()["projections"]
    assert set(with_shared) == {"qkv", "out", "qkv_shared", "out_shared"} and with_shared["out_shared"][0, 0] == 6
    assert set(ProjectionTapes(*tapes, shared=False).gradients()["projections"]) == {"qkv", "out"}


def test_reused_projections_without_a_norm_are_layers_that_are_all_the_same():
    """DR+DA less its attention MoEs and its norm is LA+DA whose layers are equal."""
    recurrent = small_config("DR+DA", attention_experts=False, residual_norm=False)
    layered = small_config("LA+DA")
    params, bias = random_weights(recurrent)
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * layered.depth), (params["layer"], bias))
    same = {**{name: params[name] for name in ("embedding", "head", "final_norm")}, "layers": copies[0]}
    tokens = random_tokens(recurrent)
    found = jitted_forward(recurrent)(params, bias, tokens, *PACKED, 3)
    expected = jitted_forward(layered)(same, copies[1], tokens, *PACKED, 3)
    assert relative_error(np.asarray(found.logits)[REAL], np.asarray(expected.logits)[REAL]) < TOLERANCE
    np.testing.assert_array_equal(found.counts["expert_attention"], expected.counts["expert_attention"])


def test_without_a_depth_code_nothing_says_how_deep_a_token_is_or_has_to_go():
    """In DR the routers alone are told: so a pass of two depths begins one of three, and with the code it does not."""
    without = WITHOUT["router_depth_code"]
    tokens = random_tokens(without)

    def begins_alike(config: DreamerConfig) -> bool:
        params, bias = random_weights(config)
        two, three = (forward(config, params, bias, tokens, *PACKED, depth=depth).counts for depth in (2, 3))
        return all(np.array_equal(two[router], three[router][:2]) for router in two)

    assert begins_alike(without) and not begins_alike(small_config("DR"))
    params, bias = random_weights(without)
    two, three = (jitted_forward(without)(params, bias, tokens, *PACKED, depth).counts for depth in (2, 3))
    for router in two:
        np.testing.assert_array_equal(two[router][:2], three[router][:2])


@jax.jit
def advance(model, tokens, positions, slots) -> Any:
    """Tokens [B, P] at these positions through all depths: logits and slots."""

    def body(l: jax.Array, carry: tuple[Flight, Any]) -> tuple[Flight, Any]:
        return model.step(carry[0], positions, l, carry[1])

    flight, slots = jax.lax.fori_loop(0, model.total_depth, body, model.enter(tokens, positions, slots))
    hidden, slots = model.leave(flight, positions, slots)
    return model.logits(hidden), slots


@pytest.mark.parametrize("name", [*WITHOUT, "injected", "slots", "both, a plain sum"])
def test_folded_weights_and_slots_give_the_same(name):
    config = {**WITHOUT, **WITH}[name]
    params, bias = random_weights(config)
    model = fold(config, params, {"balancing": bias})
    tokens = random_tokens(config, 1, (2, 6))
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    expected = forward(config, params, bias, tokens, np.ones_like(tokens), positions).logits
    slots, found = model.empty_slots(2, 6), []
    for part in (slice(0, 3), slice(3, 6)):
        logits, slots = advance(model, tokens[:, part], positions[:, part], slots)
        found.append(np.asarray(logits))
    assert relative_error(np.concatenate(found, axis=1), expected) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slots", "both, a plain sum", "injected"])
def test_gradients_with_injection_and_scale_are_those_of_an_unrolled_loop(name):
    """What is injected gets a gradient from every depth."""
    config = WITH[name]
    assert_same(static_depth_gradient(config, "full"), unrolled_gradient(config))


@pytest.mark.slow
def test_injection_starts_as_a_known_step():
    """exp(-dt) is 1/sqrt(5), B the identity; weight decay leaves all of it alone, and it is said."""
    family = build(WITH["injected"])
    weights = family.init(jax.random.key(0))[0]["layer"]["injection"]
    assert {weights[name].role for name in ("fall", "rate", "matrix")}.isdisjoint(DECAYED)
    block, (x, entered) = DiagonalInjection(8), jax.random.normal(jax.random.key(1), (2, 3, 8))
    params = nn.meta.unbox(block.init(jax.random.key(0), x, entered))
    normed = entered / np.sqrt(np.mean(entered**2, axis=-1, keepdims=True))
    expected = x / np.sqrt(5) + np.log(np.sqrt(5)) * normed
    np.testing.assert_allclose(block.apply(params, x, entered), expected, rtol=1e-4, atol=1e-5)
    assert WITH["injected"].summary.endswith("2 active, diagonal injection")
    with pytest.raises(ConfigError, match=r"model\.injection: diagonal is for DR and DR\+DA"):
        small_config("LA", injection="diagonal")


@pytest.mark.parametrize("variant", ["LA", "LA+DA"])
@pytest.mark.parametrize("name", ["attention_experts", "shared_expert", "residual_norm"])
def test_what_a_variant_does_not_have_cannot_be_left_out(variant, name):
    with pytest.raises(ConfigError, match=rf"model\.{name}: .*{variant.replace('+', '.')} has nothing to leave out"):
        small_config(variant, **{name: False})


def test_a_shared_expert_of_no_mixture_cannot_be_left_out():
    with pytest.raises(ConfigError, match=r"model\.shared_expert: .*model\.attention_experts"):
        small_config("DR", attention_experts=False, shared_expert=False)
