"""The model with the attentions' kernels (interpreted) against the one without: loss and every gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.operations import operations_of
from pallas_kernels import backend
from pallas_kernels.depth_attention import DepthAttention
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
