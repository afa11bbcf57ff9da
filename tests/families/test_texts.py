"""Parameter attention over embeddings of texts: NumPy, the gradient of its maps, decoding, and what stays as it is."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.errors import ConfigError
from dreamer_jax.families import KNOWLEDGE, build
from dreamer_jax.families import forward as whole_pass
from dreamer_jax.inference import fold
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    cross_entropy,
    logits_in_flight,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward
from tests.families.test_dreamer_parts import advance
from tests.families.test_gradients import assert_same, unrolled_loss

SLOTS: dict[str, Any] = {"pa_slots": 5, "pa_heads": 2, "pa_head_size": 8}
OF_TEXTS: dict[str, Any] = {**SLOTS, "pa_source": "texts", "pa_embedding_size": 6}
TEXTS = np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32)
CONFIGS = {
    "DR+DA": small_config("DR+DA", **OF_TEXTS),
    "LA, in a row": small_config("LA", mixing="sequential", **OF_TEXTS),
}


def state_of(bias: dict[str, Any], texts: np.ndarray = TEXTS) -> dict[str, Any]:
    return {"balancing": bias, KNOWLEDGE: {"texts": texts}}


def logits_of(config: Any, params: Any, bias: Any, tokens: np.ndarray, texts: np.ndarray = TEXTS, depth: int = 3):
    family = build(config)
    batch = {"tokens": tokens, "segment_ids": SEGMENT_IDS, "positions": POSITIONS}
    passed = whole_pass(family, params, state_of(bias, texts), batch, depth)
    hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
    return family.logits(params, hidden)


@pytest.mark.slow_but("DR+DA")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_agrees_with_numpy(name: str) -> None:
    """Packed rows, at the trained depth and a shallower one."""
    config = CONFIGS[name]
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (3, 2):
        found = jax.jit(functools.partial(logits_of, config, depth=depth))(params, bias, tokens)
        expected = forward(config, params, bias, tokens, SEGMENT_IDS, POSITIONS, depth, TEXTS)
        assert expected.margin > 5e-6, "near tie: choose another seed"
        assert relative_error(np.asarray(found)[REAL], expected.logits[REAL]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["LA", "DR+DA"])
def test_the_gradient_of_the_maps_is_that_of_an_unrolled_loop(variant: str) -> None:
    """In which the same model has learned slots, and they are what the maps make of the texts."""
    config, latents = small_config(variant, **OF_TEXTS), small_config(variant, **SLOTS)
    params, bias = random_weights(config)
    tokens, name = random_tokens(config), "layer" if config.recurrent else "layers"

    def unrolled(params: Any) -> jax.Array:
        its = params[name]["parameter_attention"]
        made = {leaf: slots(its[leaf]) for leaf in ("keys", "values")}
        return unrolled_loss({**params, name: {**params[name], "parameter_attention": {**its, **made}}}, bias, latents)

    def slots(matrix: jax.Array) -> jax.Array:
        rows = jnp.sum(TEXTS[:, :, None] * matrix[..., None, :, :], axis=-2)  # [.., M, n d]
        return jnp.stack(jnp.split(rows, 2, axis=-1), axis=-3)

    def scanned(params: Any) -> jax.Array:
        logits = logits_of(config, params, bias, tokens)
        return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), jnp.asarray(REAL))

    assert_same(*(jax.jit(jax.value_and_grad(loss))(params) for loss in (scanned, unrolled)))


@pytest.mark.slow_but("DR+DA")
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_gives_what_a_whole_pass_gives(name: str) -> None:
    """Token by token, and positions at depths of their own. Its weights hold keys and values; the embeddings stay
    behind."""
    config = CONFIGS[name]
    params, bias = random_weights(config)
    model = fold(config, params, state_of(bias))
    tokens = random_tokens(config, 1, (2, 6))
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    expected = forward(config, params, bias, tokens, np.ones_like(tokens), positions, texts=TEXTS).logits
    slots, found = model.empty_slots(2, 6), []
    for part in (slice(0, 3), slice(3, 6)):
        logits, slots = advance(model, tokens[:, part], positions[:, part], slots)
        found.append(np.asarray(logits))
    assert relative_error(np.concatenate(found, axis=1), expected) < 1e-5
    flying = np.asarray(logits_in_flight(model, tokens, positions, model.empty_slots(2, 6)))
    assert relative_error(flying, expected) < 1e-5
    its = model.params["layer" if config.recurrent else "layers"]["parameter_attention"]
    assert its["keys"].shape[-3:] == (2, 5, 8) and set(model.state) == {"balancing"}


@pytest.mark.slow
def test_other_texts_than_trained_and_another_number_of_them() -> None:
    """A text twice is the same as once where all the others are it, too."""
    config, other = CONFIGS["DR+DA"], small_config("DR+DA", **{**OF_TEXTS, "pa_slots": 9})
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    one, many = (np.broadcast_to(TEXTS[:1], (count, 6)) for count in (5, 9))
    run = jax.jit(logits_of, static_argnums=0)
    assert relative_error(run(other, params, bias, tokens, many), run(config, params, bias, tokens, one)) < 1e-5
    assert relative_error(run(config, params, bias, tokens), run(config, params, bias, tokens, one)) > 1e-3


@pytest.mark.slow
def test_texts_are_state_that_nothing_updates() -> None:
    family = build(CONFIGS["DR+DA"])
    params, state = family.init(jax.random.key(0))
    assert state[KNOWLEDGE]["texts"].shape == (5, 6) and state[KNOWLEDGE]["texts"].dtype == jnp.float32
    counts = {name: jnp.ones((3, len(b)), jnp.int32).at[:, 0].set(9) for name, b in state["balancing"].items()}
    given = {**state, KNOWLEDGE: {"texts": jnp.asarray(TEXTS)}}
    after = family.update(given, counts, jnp.int32(0))
    np.testing.assert_array_equal(after[KNOWLEDGE]["texts"], TEXTS)
    assert (after["balancing"]["expert_attention"] != 0).any()
    maps = params["layer"]["parameter_attention"]["keys"].value
    assert maps.shape == (6, 16) and float(jnp.std(maps)) == pytest.approx((5 * 6) ** -0.5, rel=0.25)
    assert CONFIGS["DR+DA"].summary.endswith("2 active, 5 texts")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pa_source": "texts", "pa_embedding_size": 6}, r"model\.pa_slots: is 0 with model\.pa_source texts"),
        ({**SLOTS, "pa_source": "texts"}, r"model\.pa_embedding_size: is 0 with model\.pa_source texts"),
        ({**SLOTS, "pa_embedding_size": 6}, r"model\.pa_embedding_size: 6 is for model\.pa_source texts"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**settings)
