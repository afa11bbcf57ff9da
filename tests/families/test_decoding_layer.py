"""A layer that decodes, outside of the recurrence: NumPy, plain autodiff, every way to read a state, and its cost."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dreamer_jax.analysis.observation import observe_batch
from dreamer_jax.blocks.parameters import DECAYED
from dreamer_jax.budget import analytic, matching, memory, program
from dreamer_jax.config.sections import MeshConfig, RecurrenceConfig
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.inference.engine import Engine
from dreamer_jax.inference.model import fold, through_depths
from dreamer_jax.parallel import make_mesh, parameter_layouts
from dreamer_jax.training import depths
from dreamer_jax.training.state import create_state
from tests.families import numpy_reference
from tests.families.cases import (
    PACKED,
    REAL,
    jitted_forward,
    logits_in_flight,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.test_gradients import assert_same, static_depth_gradient, unrolled_gradient
from tests.parallel.test_meshes import assert_close, loss_and_gradients
from tests.training.cases import tiny_config

TOLERANCE = 1e-5
N = 10
CASES = {
    "normalised": small_config("DR+DA", decoding_size=N),
    "a plain sum": small_config("DR", decoding_size=N, residual_norm=False),
}
CONFIG = CASES["normalised"]


@functools.cache
def read_after(config: Any, total: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows of one document, and by the definition the logits after every depth of a pass of so many: [B, S, V] each."""
    params, bias = map(numpy_reference.float64, random_weights(config))
    tokens = random_tokens(config, 1, (2, 6))
    rows = []
    for row in tokens:
        its = numpy_reference.Pass(config, params, bias, total)
        its.document(params["embedding"][row], np.arange(6))
        rows.append([its.read(x) @ params["head"].T for x in its.states])
    return tokens, [np.stack(each) for each in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_equal_to_numpy(name):
    """Packed rows, at the trained depth and a deeper one."""
    config = CASES[name]
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (3, 2):
        expected = numpy_reference.forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > 5e-6, "near tie: choose another seed"
        found = jitted_forward(config)(params, bias, tokens, *PACKED, depth)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalised", "a plain sum"])
def test_gradients_are_those_of_an_unrolled_loop(name):
    assert_same(static_depth_gradient(CASES[name], "full"), unrolled_gradient(CASES[name]))


def test_a_layer_that_adds_nothing_is_none():
    """Its final norm meets a stream that is normalised, as long as the scale of every depth's is one."""
    plain = small_config("DR+DA")
    params, bias = random_weights(CONFIG)
    params = jax.tree.map(jnp.asarray, params)
    params["decoding"]["feed_forward"]["out"] *= 0
    for name, its in (("residual_norm", params["layer"]), ("final_norm", params)):
        its[name] = {"scale": jnp.ones(16)}
    tokens = random_tokens(plain)
    found = jitted_forward(CONFIG)(params, bias, tokens, *PACKED, 3).logits
    without = {name: params[name] for name in ("embedding", "head", "layer")}
    expected = jitted_forward(plain)(without, bias, tokens, *PACKED, 3).logits
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.slow
def test_it_changes_no_number_that_a_seed_gives_the_rest():
    """And it is drawn as an expert is, and decayed as one."""
    init = jax.jit(initialise, static_argnums=0)
    (plain, _), (params, _) = (init(build(each), jax.random.key(3)) for each in (small_config("DR+DA"), CONFIG))
    jax.tree.map(np.testing.assert_array_equal, {name: params[name] for name in plain}, plain)
    assert set(params) - set(plain) == {"decoding", "final_norm"}
    wide: Any = build(small_config("DR+DA", decoding_size=4000))
    its = nn.meta.unbox(wide.decoding.draw(jax.random.key(3)))["feed_forward"]
    for name, std in (("gate", (5 * 16) ** -0.5), ("up", (5 * 16) ** -0.5), ("out", (2.5 * 16 * 3 * 3) ** -0.5)):
        assert np.std(its[name]) == pytest.approx(std, rel=0.02)
    roles = build(CONFIG).roles["decoding"]
    assert set(roles["feed_forward"].values()) == {"matrix"} <= DECAYED and roles["norm"]["scale"] not in DECAYED


def test_positions_at_depths_of_their_own_come_to_a_whole_pass():
    """Folded, at the trained depth and a deeper one."""
    params, bias = random_weights(CONFIG)
    for depth in (3, 5):
        model = fold(CONFIG, params, {"balancing": bias}, depth=depth)
        tokens, logits = read_after(CONFIG, depth)
        places = jnp.broadcast_to(jnp.arange(6), tokens.shape)
        found = logits_in_flight(model, jnp.asarray(tokens), places, model.empty_slots(2, 6))
        assert relative_error(found, logits[-1]) < TOLERANCE


def test_an_early_exit_is_decoded_too():
    """As samplers leave: after two depths of three, and all of them."""
    tokens, logits = read_after(CONFIG, 3)
    params, bias = random_weights(CONFIG)
    model = fold(CONFIG, params, {"balancing": bias})
    places = jnp.broadcast_to(jnp.arange(6), tokens.shape)
    for taken in (2, 3):
        hidden, _ = through_depths(model, jnp.asarray(tokens), places, model.empty_slots(2, 6), jnp.int32(taken))
        assert relative_error(model.logits(hidden), logits[taken - 1]) < TOLERANCE


def losses(logits: np.ndarray, targets: np.ndarray) -> float:
    """Summed over all targets."""
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(logs, targets[..., None], -1).sum()


def test_losses_and_lenses_at_every_depth_read_through_it():
    """What is scored after the last two of three depths, and what analysis reads after each."""
    tokens, logits = read_after(CONFIG, 3)
    targets, everywhere = np.roll(tokens, -1, axis=1), np.ones(tokens.shape, bool)
    params, bias = random_weights(CONFIG)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": np.ones_like(tokens), "loss_mask": everywhere}
    batch |= {"positions": np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape), "answer_mask": everywhere}
    expected = [losses(each, targets) for each in logits]
    how, family = RecurrenceConfig(draw="fixed", scored=2, scored_weight=0.5), build(CONFIG)

    @jax.jit
    def loss(params):
        passed = forward(family, params, {"balancing": bias}, batch, kept_states=depths.kept_states(how, family))
        return depths.loss(how, family, params, passed, batch)[0]

    assert float(loss(params)) == pytest.approx(expected[2] + 0.5 * expected[1], rel=1e-5)
    seen = jax.jit(functools.partial(observe_batch, CONFIG))(params, {"balancing": bias}, batch)
    np.testing.assert_allclose(seen["lens_loss"], expected, rtol=1e-5)


def test_the_program_has_what_is_counted():
    """Three matrices and two norms, once a token, outside of the depths; nothing more is cached."""
    plain = dataclasses.replace(CONFIG, decoding_size=0)
    for config in CASES.values():
        assert program.count(config, 6) == program.expected(config, 6)
    family, without = build(CONFIG), build(plain)
    assert analytic.parameters(family) == {**analytic.parameters(without), "decoding": 3 * N * 16 + 2 * 16}
    assert analytic.matmul_flops(family, 6) == {**analytic.matmul_flops(without, 6), "decoding": 6 * N * 16}
    outside, inside = analytic.flops_by_depth(without, 6)
    assert analytic.flops_by_depth(family, 6) == (outside + 6 * N * 16, inside)
    assert memory.caches(family, 9) == memory.caches(without, 9)


def test_matching_makes_room_for_it():
    """Experts become smaller by about what it takes."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_experts": 40, "expert_size": 256, "depth": 4}
    baseline, model = (build(small_config(variant, **sizes)) for variant in ("LA", "DR"))
    found = {}
    for decoding in (0, 256):
        its = matching.changed(model, {"decoding_size": decoding})
        found[decoding] = matching.match(its, matching.target_of(baseline, its, 64), 64)
    for each in found.values():
        assert abs(each.gaps_percent["flops_per_token"]) < 1 and abs(each.gaps_percent["params"]) < 0.3
    before, after = (analytic.matmul_flops(found[size].family, 64)["EA"] for size in (0, 256))
    step = 4 * 2 * 3 * 2 * 8 * 64  # of 8 neurons in each of two experts at four depths
    assert before - after == pytest.approx(6 * 256 * 64, abs=step)


def test_its_neurons_are_divided_as_experts_are():
    mesh = make_mesh(MeshConfig(expert=2, data=(2, 2)))
    layouts = parameter_layouts(build(small_config("DR", decoding_size=16)).boxed, mesh)["decoding"]
    assert {its.expert_dim for its in layouts["feed_forward"].values()} == {0}
    assert layouts["norm"]["scale"].expert_dim is None


@pytest.mark.slow
def test_loss_and_gradients_on_a_mesh_are_those_of_one_device():
    """Eleven neurons, which two devices can't divide evenly."""
    config = tiny_config(model__decoding_size=11)
    state = jax.device_get(create_state(config, make_mesh(config.mesh)))
    found, wanted = (
        loss_and_gradients(config, state, mesh) for mesh in (MeshConfig(data=(2, 2), expert=2), MeshConfig())
    )
    assert_close(found, wanted)


@pytest.mark.slow
def test_generation_on_a_mesh_is_that_of_one_device():
    """Greedily; of eleven neurons each of two devices has six, one of them padding."""
    config = small_config("DR+DA", decoding_size=11)
    params, bias = random_weights(config)
    model = fold(config, params, {"balancing": bias})
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data0", "expert"))
    spread, prompts = Engine(model, mesh=mesh), [[1, 2, 3, 4], [5, 6, 7], [8], [9, 10]]
    found, wanted = (engine.generate(prompts, 4) for engine in (spread, Engine(model)))
    assert [row.tokens for row in found] == [row.tokens for row in wanted]
    gate = spread.model.params["decoding"]["feed_forward"]["gate"]
    assert gate.shape == (12, 16) and gate.addressable_shards[0].data.shape == (6, 16)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"variant": "LA"},
            "model.decoding_size: 10 is for DR and DR+DA; LA has layers of its own, so leave the setting",
        ),
        ({"decoding_size": -1}, "model.decoding_size: -1 is too small"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, line):
    with pytest.raises(ConfigError) as caught:
        small_config(**{"variant": "DR", "decoding_size": N, **changes})
    assert str(caught.value).startswith(line)


def test_a_summary_says_so():
    assert CONFIG.summary.endswith("2 active, a decoding layer of 10")
