"""Gradients of the depth scan against an unrolled Python loop under plain autodiff, for every parameter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.memory import Context, Fresh, Memory
from dreamer_jax.blocks.norms import rms_norm
from dreamer_jax.blocks.operations import REFERENCE, Plain, operations_of
from dreamer_jax.families import build
from dreamer_jax.families.contract import depth_of
from pallas_kernels.attention_moe import ExpertLinear, LinearTape
from pallas_kernels.depth_attention import DepthCache
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    VARIANTS,
    apply,
    cross_entropy,
    random_tokens,
    random_weights,
    small_config,
)

TOLERANCE = 1e-5  # of each parameter's largest gradient, float32 against float32


def unrolled_loss(params, bias, config, operations=REFERENCE, depth=None):
    """The loss by a plain loop: a list of keys and values, the definitions of the operations, nothing of the scan."""
    depth = depth or config.depth
    tokens = random_tokens(config)
    context = Context(jnp.asarray(SEGMENT_IDS), jnp.asarray(POSITIONS))
    layer = build(config, operations).layer
    x = entered = params["embedding"][tokens]
    empty = jnp.zeros((tokens.size, config.da_kv_heads * config.da_head_size))
    keys, values = [empty] * depth, [empty] * depth
    for l in range(depth):
        weights, own_bias = params.get("layer"), bias
        if not config.recurrent:
            weights, own_bias = jax.tree.map(lambda rows, l=l: rows[l], (params["layers"], bias))
        cache = DepthCache(jnp.stack(keys), jnp.stack(values)) if config.depth_attention else None
        at, memory = depth_of(l, depth), Memory(Fresh(), cache)
        x, memory, _, _ = layer.apply({"params": weights}, x, at, memory, own_bias, context, entered=entered)
        if config.depth_attention:
            keys[l], values[l] = memory.depths.keys[l], memory.depths.values[l]
    if config.decoding_size:
        its, normed = params["decoding"]["feed_forward"], rms_norm(x, params["decoding"]["norm"]["scale"])
        x = x + (jax.nn.silu(normed @ its["gate"].T) * (normed @ its["up"].T)) @ its["out"]
    if config.final_norm:
        x = rms_norm(x, params["final_norm"]["scale"])
    return cross_entropy(x @ params["head"].T, jnp.roll(tokens, -1, axis=1), jnp.asarray(REAL))


def model_loss(params, bias, config, remat, depth=None, operations=None):
    """The same loss through the model."""
    tokens = jnp.asarray(random_tokens(config))
    logits = apply(config, params, bias, tokens, SEGMENT_IDS, POSITIONS, depth, remat, operations).logits
    return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), jnp.asarray(REAL))


@functools.cache
def unrolled_gradient(config, depth=None):
    """(loss, gradients) by plain autodiff."""
    loss = functools.partial(unrolled_loss, config=config, depth=depth)
    return jax.jit(jax.value_and_grad(loss))(*random_weights(config))


@functools.cache
def static_depth_gradient(config, remat):
    """(loss, gradients) of the model at its trained depth."""
    return jax.jit(jax.value_and_grad(functools.partial(model_loss, config=config, remat=remat)))(
        *random_weights(config)
    )


@functools.cache
def run_time_depth_gradient(config, remat="full"):
    """(params, bias, depth) -> (loss, gradients), one program for every depth."""
    return jax.jit(jax.value_and_grad(functools.partial(model_loss, config=config, remat=remat)))


def assert_same(actual, expected, tolerance=TOLERANCE):
    """Loss and every parameter's gradient to a tolerance."""
    (loss, gradient), (expected_loss, expected_gradient) = actual, expected
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected_gradient)
    for path, wanted in jax.tree_util.tree_leaves_with_path(expected_gradient):
        name, got = jax.tree_util.keystr(path), functools.reduce(lambda tree, key: tree[key.key], path, gradient)
        largest = float(jnp.abs(wanted).max())
        assert largest > 0, f"{name} gets no gradient: the comparison would be empty"
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.mark.slow_but("DR+DA")
@pytest.mark.parametrize("variant", VARIANTS)
def test_linear_memory_scan_equals_unrolled_loop(variant):
    """remat full, static depth: the hand-written backward pass, with the operations' own gradients inside."""
    config = small_config(variant)
    assert_same(static_depth_gradient(config, "full"), unrolled_gradient(config))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["LA+DA", "DR+DA"])
def test_plain_scan_equals_unrolled_loop(variant):
    """remat none."""
    config = small_config(variant)
    assert_same(static_depth_gradient(config, "none"), unrolled_gradient(config))


def test_remat_attention_gives_the_gradient_of_full():
    """What is kept of a layer, and what is computed again from it, are what they were."""
    config = small_config("DR+DA")
    assert_same(static_depth_gradient(config, "attention"), static_depth_gradient(config, "full"), 1e-6)


XLA = operations_of("xla")


@jax.custom_vjp
def on_tape(x, index, score, routed, shared, tape):
    return XLA.expert_linear(x, index, score, routed, shared)


def on_tape_backward(residuals, d_out):
    x, index, score, routed, shared, tape = residuals
    vjp = jax.vjp(lambda x, score, routed: XLA.expert_linear(x, index, score, routed, shared), x, score, routed)[1]
    d_x, d_score, d_routed = vjp(d_out)
    return d_x, None, d_score, None, None, LinearTape(tape.totals + d_routed)


on_tape.defvjp(lambda *arguments: (on_tape(*arguments), arguments), on_tape_backward)


class TapedLinear(ExpertLinear):
    """The plain form as the kernel does it on a tape: the matrices get no gradient, the tape their totals."""

    def __call__(self, x, index, score, routed, shared=None, tape=None):
        if tape is None:
            return XLA.expert_linear(x, index, score, routed, shared)
        return on_tape(x, index, score, routed, shared, tape)

    def start_tape(self, tokens, routed, dtype):
        return LinearTape(jnp.zeros(routed))


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_totals_of_the_attention_moes_on_the_tape(remat):
    """The routed experts' gradients, and the shared one's, which is their sum, by way of the tape."""
    config = small_config("DR+DA")
    operations = dataclasses.replace(XLA, expert_linear=TapedLinear())
    loss = functools.partial(model_loss, config=config, remat=remat, operations=operations)
    assert_same(jax.jit(jax.value_and_grad(loss))(*random_weights(config)), unrolled_gradient(config))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "attention", "none"])
@pytest.mark.parametrize("depth", [2, 3])
def test_run_time_depth_gives_the_same_gradient(depth, remat):
    """A traced depth, the trained one and a smaller one, by one compiled program for each remat policy."""
    config = small_config("DR+DA")
    actual = run_time_depth_gradient(config, remat)(*random_weights(config), depth=depth)
    assert_same(actual, unrolled_gradient(config, depth if depth != config.depth else None))


@pytest.mark.slow  # its pass is tested for every variant in test_forward.py
def test_sequential_mixing():
    """The order in which depth attention comes first and everything else depends on it."""
    config = small_config("DR+DA", "sequential", depth=2)
    gradient = jax.jit(jax.value_and_grad(functools.partial(model_loss, config=config, remat="full")))
    assert_same(gradient(*random_weights(config)), unrolled_gradient(config))


def naive_expert_linear(x, index, score, routed, shared):
    """Eq. 8 under plain autodiff: same values, but the score sees the shared expert."""
    return score[:, None] * jnp.einsum("ta,tab->tb", x, (routed + shared)[index])


def test_routers_learn_by_eq_7_not_eq_8():
    """In the model: the attention MoEs' routers get Eq. 7's gradient, which Eq. 8's autodiff clearly misses."""
    config = small_config("DR+DA")
    naive = dataclasses.replace(REFERENCE, expert_linear=Plain(naive_expert_linear))
    loss = functools.partial(unrolled_loss, config=config, operations=naive)
    naive_value, wrong = jax.jit(jax.value_and_grad(loss))(*random_weights(config))
    value, right = unrolled_gradient(config)
    actual = run_time_depth_gradient(config)(*random_weights(config), depth=config.depth)[1]
    assert float(naive_value) == pytest.approx(float(value), rel=1e-5)
    for attention in ("sequence_attention", "depth_attention"):
        routers = [tree["layer"][attention]["projections"]["router"] for tree in (actual, right, wrong)]
        for name in ("query", "keys"):
            ours, eq_7, eq_8 = (router[name] for router in routers)
            norm = jnp.linalg.norm(eq_7)
            assert jnp.linalg.norm(ours - eq_7) < 1e-5 * norm, (attention, name)
            assert jnp.linalg.norm(ours - eq_8) > 0.1 * norm, (attention, name)
