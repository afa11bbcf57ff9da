"""The chunked loss and its hand-written gradient against a plain float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks import loss

T, H, V = 11, 6, 13


@pytest.fixture(params=[1, 3 * V, 4 * V + 5, 100 * V], ids=["row", "3 rows", "uneven", "one chunk"])
def chunked(request, monkeypatch):
    """Chunks of one row, of three (the last is filled up), of a size V doesn't divide, and everything at once."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", request.param)
    monkeypatch.setattr(loss, "CHUNK_ROWS", 1)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden, head = 2 * rng.normal(size=(T, H)), rng.normal(size=(V, H))
    return hidden, head, rng.integers(0, V, T), rng.random(T) < 0.6


def log_probabilities(hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
    logits = hidden @ head.T
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def expected(hidden, head, targets, mask):
    """Sum over the mask, and its gradient: softmax minus one-hot."""
    log_p = log_probabilities(hidden, head)
    d_logits = (np.exp(log_p) - np.eye(V)[targets]) * mask[:, None]
    return -log_p[np.arange(T), targets][mask].sum(), d_logits @ head, d_logits.T @ hidden


def as_float32(hidden, head, targets, mask):
    return jnp.float32(hidden), jnp.float32(head), jnp.int32(targets), jnp.asarray(mask)


def test_value_and_gradient(chunked):
    hidden, head, targets, mask = inputs()
    assert 2 < mask.sum() < T - 2
    value, d_hidden, d_head = expected(hidden, head, targets, mask)
    x, w, y, m = as_float32(hidden, head, targets, mask)
    found, (found_x, found_w) = jax.value_and_grad(lambda x, w: 3 * loss.cross_entropy(x, w, y, m), (0, 1))(x, w)
    np.testing.assert_allclose(found, 3 * value, rtol=1e-6)
    np.testing.assert_allclose(found_x, 3 * d_hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found_w, 3 * d_head, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss.cross_entropy(x, w, y, m), value, rtol=1e-6)  # without a gradient


def test_weights_in_place_of_a_mask(chunked):
    """The sum is weighted, and a weight's gradient is the loss that it stands before."""
    hidden, head, targets, _ = inputs()
    weights = np.random.default_rng(1).normal(size=T)
    log_p = log_probabilities(hidden, head)
    losses = -log_p[np.arange(T), targets]
    d_logits = (np.exp(log_p) - np.eye(V)[targets]) * weights[:, None]
    x, w, y, _ = as_float32(hidden, head, targets, targets > 0)
    found, gradients = jax.value_and_grad(lambda *a: 3 * loss.cross_entropy(a[0], a[1], y, a[2]), (0, 1, 2))(
        x, w, jnp.float32(weights)
    )
    np.testing.assert_allclose(found, 3 * (losses @ weights), rtol=1e-5)
    wanted = (d_logits @ head, d_logits.T @ hidden, losses)
    for a, b in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(a, 3 * b, rtol=1e-5, atol=1e-5)


def test_z_loss(chunked):
    """z (log Z)^2 beside every loss; its gradient by a logit is 2 z log Z times the softmax."""
    hidden, head, targets, _ = inputs()
    weights, z = np.random.default_rng(1).normal(size=T), 0.1
    logits = hidden @ head.T
    normaliser = np.log(np.exp(logits).sum(1))
    losses = normaliser - logits[np.arange(T), targets] + z * normaliser**2
    softmax = np.exp(logits - normaliser[:, None])
    d_logits = (softmax * (1 + 2 * z * normaliser)[:, None] - np.eye(V)[targets]) * weights[:, None]
    x, w, y, _ = as_float32(hidden, head, targets, targets > 0)
    of = lambda *a: loss.cross_entropy(a[0], a[1], y, a[2], z)  # noqa: E731
    found, gradients = jax.value_and_grad(of, (0, 1, 2))(x, w, jnp.float32(weights))
    np.testing.assert_allclose(found, losses @ weights, rtol=1e-5)
    np.testing.assert_allclose(of(x, w, jnp.float32(weights)), losses @ weights, rtol=1e-5)  # without a gradient
    for a, b in zip(gradients, (d_logits @ head, d_logits.T @ hidden, losses), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_nothing_masked_in_costs_nothing(chunked):
    x, w, y, _ = as_float32(*inputs())
    value, gradient = jax.value_and_grad(loss.cross_entropy)(x, w, y, jnp.zeros(T, bool))
    assert value == 0 and not np.any(gradient)


def test_large_logits_stay_finite(chunked):
    x, w, y, m = as_float32(*inputs())
    value, gradient = jax.value_and_grad(loss.cross_entropy)(1e4 * x, w, y, m)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_token_losses(chunked):
    hidden, head, targets, _ = inputs()
    log_p = log_probabilities(hidden, head)
    targets[::2] = log_p.argmax(1)[::2]
    losses, correct = loss.token_losses(*as_float32(hidden, head, targets, targets > 0)[:3])
    np.testing.assert_allclose(losses, -log_p[np.arange(T), targets], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(correct, log_p.argmax(1) == targets)
    assert correct.shape == (T,) and 0 < correct.sum() < T


def test_bfloat16_hidden_states_give_a_float32_loss_and_head_gradient():
    """Products are of bfloat16 factors, everything after them is float32."""
    hidden, head, targets, mask = inputs()
    x, w, y, m = as_float32(hidden, head, targets, mask)
    x = x.astype(jnp.bfloat16)
    rounded = np.asarray(x, np.float64), np.asarray(w.astype(jnp.bfloat16), np.float64)
    value, d_hidden, d_head = expected(*rounded, targets, mask)
    found, (found_x, found_w) = jax.value_and_grad(loss.cross_entropy, (0, 1))(x, w, y, m)
    assert (found.dtype, found_x.dtype, found_w.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found_x, np.float64), d_hidden, atol=0.02 * np.abs(d_hidden).max())
    np.testing.assert_allclose(found_w, d_head, atol=0.02 * np.abs(d_head).max())
