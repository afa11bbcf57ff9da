"""The model with kernels (interpreted) against the one without: loss and every gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.config.models.moeut import MoeutConfig
from dreamer_jax.families import build, forward, initialise
from pallas_kernels import backend
from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.depth_attention import DepthAttention
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.sequence_attention import SequenceAttention
from tests.families.cases import apply, cross_entropy, random_tokens, random_weights, small_config

TOLERANCE = 2e-5  # of each parameter's largest gradient, float32
SHAPE = (1, 128)
SEGMENT_IDS = np.repeat([[1, 2, 2, 0]], 32, axis=1).astype(np.int32)


XLA = operations_of("xla")
ATTENTIONS = dataclasses.replace(
    XLA, sequence_attention=SequenceAttention("pallas"), depth_attention=DepthAttention("pallas")
)


def kernel_config():
    """As small as the kernels take: depth attention of two heads, splash attention."""
    sizes = {"hidden_size": 128, "da_heads": 2, "da_kv_heads": 1, "da_head_size": 128, "sa_head_size": 64}
    return small_config("DR+DA", sa_heads=2, sa_kv_heads=1, expert_size=8, **sizes)


def loss_and_gradient(operations):
    """By the linear-memory scan."""
    config = kernel_config()
    tokens = random_tokens(config, shape=SHAPE)
    real = jnp.asarray(SEGMENT_IDS > 0)

    def loss(params, bias):
        logits = apply(config, params, bias, tokens, SEGMENT_IDS, operations=operations).logits
        return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), real)

    params, bias = random_weights(config)
    return jax.jit(jax.value_and_grad(loss))(params, bias)


@pytest.mark.slow
def test_kernels_give_the_same_loss_and_gradients(caplog):
    """And they are really taken: neither attention falls back."""
    backend._say_once.cache_clear()
    loss, gradient = loss_and_gradient(ATTENTIONS)
    assert not [r.message for r in caplog.records if "attention without a kernel" in r.message]
    expected_loss, expected = loss_and_gradient(XLA)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for path, wanted in jax.tree_util.tree_leaves_with_path(expected):
        got = functools.reduce(lambda tree, key: tree[key.key], path, gradient)
        largest = float(jnp.abs(wanted).max())
        assert largest > 0
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * largest, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_expert_maps_of_moeut_on_the_tape():
    """Both maps of its experts, and of its heads, by the kernels of the attention MoE; gradients are on the tape."""
    config = MoeutConfig(
        depth=2,
        layers=1,
        hidden_size=128,
        vocab_size=23,
        heads=1,
        head_size=128,
        attention_experts=2,
        attention_experts_per_token=1,
        num_experts=3,
        experts_per_token=2,
        expert_size=128,
        dtype="float32",
    )
    params, _ = initialise(build(config), jax.random.key(0))
    tokens = np.arange(32, dtype=np.int32)[None] % 23
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1), "loss_mask": np.ones((1, 32), bool)}

    def found(operations):
        family = build(config, operations)

        def loss(params):
            return family.loss(params, forward(family, params, {}, batch), batch)[0]

        return jax.jit(jax.value_and_grad(loss))(params)

    kernels = dataclasses.replace(XLA, expert_linear=ExpertLinear("pallas"))
    weights = build(config, kernels).weights(params)
    tape = build(config, kernels).start_tape(weights, 32, 2)
    assert set(tape["0"]["attention"]["experts"].maps) == {"v", "o"}
    assert set(tape["0"]["feed_forward"]["experts"].maps) == {"keys", "values"}
    (loss, gradient), (wanted_loss, wanted) = found(kernels), found(XLA)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE * float(jnp.abs(b).max())), gradient, wanted
    )


@pytest.mark.slow  # kernels are interpreted
def test_linear_experts_without_a_shared_one_on_the_tape():
    """The tape has gradients of the parameters that there are, and no others."""
    sizes = {"depth": 2, "hidden_size": 128, "sa_heads": 1, "sa_kv_heads": 1, "sa_head_size": 128}
    config = small_config("DR", shared_expert=False, **sizes)
    params, bias = random_weights(config)
    tokens = random_tokens(config, shape=(1, 32))
    kernels = dataclasses.replace(XLA, expert_linear=ExpertLinear("pallas"))
    family = build(config, kernels)
    assert "projections" in family.start_tape(family.weights(params), 32, 2)["sequence_attention"]

    def found(operations):
        def loss(params):
            logits = apply(config, params, bias, tokens, operations=operations).logits
            return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape))

        return jax.jit(jax.value_and_grad(loss))(params)

    (loss, gradient), (wanted_loss, wanted) = found(kernels), found(XLA)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE * float(jnp.abs(b).max())), gradient, wanted
    )


@pytest.mark.slow  # kernels are interpreted
@pytest.mark.parametrize(("remat", "recompute"), [("full", True), ("none", False)])
def test_experts_of_several_depths_at_once(remat, recompute):
    """Three depths whose rows are kept aside, two at a time, of both kinds of experts; gate and up kept, or not.
    (Under jax.checkpoint, which remat "attention" takes, kernels can't be interpreted.)"""
    sizes = {"depth": 3, "hidden_size": 128, "sa_heads": 1, "sa_kv_heads": 1, "sa_head_size": 128, "expert_size": 8}
    config = small_config("DR", **sizes)
    params, bias = random_weights(config)
    tokens = random_tokens(config, shape=(1, 32))
    kernels = dataclasses.replace(
        XLA,
        expert_linear=ExpertLinear("pallas", 2, 3),
        expert_mlp=ExpertMLP("pallas", 2, 3, recompute=recompute),
    )

    def found(operations, remat):
        def loss(params):
            logits = apply(config, params, bias, tokens, remat=remat, operations=operations).logits
            return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape))

        return jax.jit(jax.value_and_grad(loss))(params)

    (loss, gradient), (wanted_loss, wanted) = found(kernels, remat), found(XLA, "full")
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE * float(jnp.abs(b).max())), gradient, wanted
    )


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_what_a_gpu_takes(monkeypatch, caplog, shared):
    """All of its kernels in one model, in float32, which a GPU's matrix units wouldn't take; gradients on the tape."""
    backend._say_once.cache_clear()
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    monkeypatch.setattr(backend, "in_place", lambda implementation: False)
    monkeypatch.setattr("pallas_kernels.gpu.unsupported_products", lambda *sizes, dtype: None)
    monkeypatch.setattr("pallas_kernels.sequence_attention.triton.WIDE", 64)
    monkeypatch.setattr("pallas_kernels.sequence_attention.triton.NARROW", 32)
    sizes = {"depth": 3, "hidden_size": 32, "expert_size": 16, "da_heads": 2, "da_kv_heads": 1, "da_head_size": 16}
    config = small_config("DR+DA", sa_heads=2, sa_kv_heads=1, sa_head_size=16, shared_expert=shared, **sizes)
    params, bias = random_weights(config)
    tokens = random_tokens(config, shape=SHAPE)
    real = jnp.asarray(SEGMENT_IDS > 0)

    def found(operations):
        def loss(params):
            logits = apply(config, params, bias, tokens, SEGMENT_IDS, operations=operations).logits
            return cross_entropy(logits, jnp.roll(tokens, -1, axis=1), real)

        return jax.jit(jax.value_and_grad(loss))(params)

    kernels = operations_of("auto")
    tape = build(config, kernels).start_tape(build(config, kernels).weights(params), SHAPE[1], 3)
    assert "projections" in tape["sequence_attention"] and "projections" in tape["depth_attention"]
    (loss, gradient), (wanted_loss, wanted) = found(kernels), found(XLA)
    assert not caplog.records
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE * float(jnp.abs(b).max())), gradient, wanted
    )
