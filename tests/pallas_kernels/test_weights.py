"""Matrices as a CPU decodes with them, against NumPy: as they are, as bits of bfloat16, and in eight bits."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.weights import OutputRows

RNG = np.random.default_rng(0)
MATRICES = RNG.normal(size=(3, 5, 64)).astype(np.float32)  # [E, b, a]
ROWS = RNG.normal(size=(2, 64)).astype(np.float32)


def product(weight: OutputRows, rows: np.ndarray, index: int) -> jax.Array:
    return jax.jit(OutputRows.product)(weight, jnp.asarray(rows), index)


def test_a_product_with_matrices_as_they_are():
    np.testing.assert_allclose(product(OutputRows.of(jnp.asarray(MATRICES)), ROWS, 1), ROWS @ MATRICES[1].T, rtol=1e-5)


def test_bits_of_bfloat16_are_its_numbers():
    rounded = jnp.asarray(MATRICES, jnp.bfloat16)
    weight = OutputRows.of(rounded)
    assert weight.matrices.dtype == jnp.uint16 and weight.shape == MATRICES.shape
    expected = ROWS @ np.asarray(rounded[2], np.float32).T
    np.testing.assert_allclose(product(weight, ROWS, 2), expected, rtol=1e-5)
    assert product(weight, jnp.asarray(ROWS, jnp.bfloat16), 2).dtype == jnp.bfloat16


def test_eight_bits_are_wrong_by_half_of_a_step_at_most():
    """A step is a 127th of the row's largest number; that one, and a row of zeros, are exact."""
    matrices = MATRICES.copy()
    matrices[1, 3] = 0
    weight = OutputRows.in_int8(jnp.asarray(matrices))
    assert weight.matrices.dtype == jnp.int8 and weight.scales is not None
    kept = np.asarray(weight.matrices, np.float32) * np.asarray(weight.scales)[..., None]
    steps = np.abs(matrices).max(axis=-1, keepdims=True) / 127
    assert np.all(np.abs(kept - matrices) <= steps * 0.5001)
    assert np.abs(kept - matrices).max() > 0.4 * steps.min()
    np.testing.assert_allclose(np.abs(kept).max(axis=-1), np.abs(matrices).max(axis=-1), rtol=1e-6)
    assert not kept[1, 3].any()
    for index in range(3):
        np.testing.assert_allclose(product(weight, ROWS, index), ROWS @ kept[index].T, rtol=1e-5, atol=1e-5)
