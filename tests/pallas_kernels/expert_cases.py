"""Arguments of the experts' operations, and how they are compared: shared by the tests of their kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels.expert_mlp.reference as mlp_reference
from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.expert_mlp import ExpertMLP

TOKENS, CHOICES, EXPERTS, SIZE, HIDDEN = 23, 3, 6, 24, 128  # 69 rows in blocks of 16: no multiple of one
SELECTIONS = ("random", "one hot", "some elsewhere", "all elsewhere")
TOLERANCE = 1e-5
MLP, LINEAR = ExpertMLP("pallas"), ExpertLinear("pallas")


def normal(seed, *shape):
    """Float32 standard normal."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def choose(kind, choices, seed=3):
    """[T, choices] int32. "one hot": every token takes the same, all other experts are empty; E: no expert here."""
    if kind == "one hot":
        return np.broadcast_to(np.arange(choices) + 2, (TOKENS, choices)).astype(np.int32)
    if kind == "all elsewhere":
        return np.full((TOKENS, choices), EXPERTS, np.int32)
    last = EXPERTS + (kind == "some elsewhere")
    return np.argsort(normal(seed, TOKENS, last), axis=1)[:, :choices].astype(np.int32)


def mlp_case(kind, hidden=HIDDEN, seed=3, dtype=jnp.float32):
    """Indices; x, weights, gate_up, down; a cotangent."""
    shapes = (TOKENS, hidden), (TOKENS, CHOICES), (EXPERTS, 2 * SIZE, hidden), (EXPERTS, SIZE, hidden)
    return choose(kind, CHOICES, seed), _floats(shapes, dtype), jnp.asarray(normal(seed + 9, *shapes[0]), dtype)


FILLED = 33, 48, 49, 32, 14, 0
"""Rows of each expert: blocks of 32 are filled to one row, a half, one more, whole."""


def _repeated(counts):
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def halves_case(experts=EXPERTS):
    """As `mlp_case`, with `FILLED` rows, and some elsewhere.

    Of one expert: the last slot, which a pair that is elsewhere has, is in the half that isn't computed.
    """
    indices = _repeated([*FILLED, 16] if experts > 1 else [35, 1]).reshape(-1, CHOICES)
    shapes = (len(indices), HIDDEN), indices.shape, (experts, 2 * SIZE, HIDDEN), (experts, SIZE, HIDDEN)
    return indices, _floats(shapes, jnp.float32), jnp.asarray(normal(9, *shapes[0]))


def linear_case(kind, inward=128, outward=256, dtype=jnp.float32):
    """Index; x, score, routed, shared; a cotangent."""
    shapes = (TOKENS, inward), (TOKENS,), (EXPERTS, inward, outward), (inward, outward)
    return choose(kind, 1)[:, 0], _floats(shapes, dtype), jnp.asarray(normal(9, TOKENS, outward), dtype)


def linear_halves_case(inward=128, outward=256):
    """As `linear_case`, with `FILLED` rows."""
    shapes = (sum(FILLED), inward), (sum(FILLED),), (EXPERTS, inward, outward), (inward, outward)
    return _repeated(FILLED), _floats(shapes, jnp.float32), jnp.asarray(normal(9, sum(FILLED), outward))


def _floats(shapes, dtype):
    """The second, a weight or a score, is always float32."""
    scales = (1, 1, 0.3, 0.3)
    arrays = [normal(n, *shape) * scale for n, (shape, scale) in enumerate(zip(shapes, scales, strict=True))]
    return tuple(jnp.asarray(array, jnp.float32 if n == 1 else dtype) for n, array in enumerate(arrays))


def fresh(operation):
    """Jitted: (indices, floats, cotangent) -> (value, gradients in all floats)."""

    def run(indices, floats, cotangent):
        value, vjp = jax.vjp(lambda x, weight, *matrices: operation(x, indices, weight, *matrices), *floats)
        return value, vjp(cotangent)

    return jax.jit(run)


compiled = functools.cache(fresh)
"""The same, traced once."""


def on_tape(mlp=MLP):
    """One depth of the backward scan, jitted: (indices, floats, cotangent, tape) -> (d_x, d_weights, tape)."""

    def run(indices, floats, cotangent, tape):
        x, weights, gate_up, down = floats

        def operation(x, weights, tape):
            return mlp(x, indices, weights, gate_up, down, tape)

        return jax.vjp(operation, x, weights, tape)[1](cotangent)

    return jax.jit(run)


def with_an_empty_expert(x, indices, weights, gate_up, down):
    """The definition, for indices that may be E: an expert whose outputs are zero."""
    pad = ((0, 1), (0, 0), (0, 0))
    return mlp_reference.expert_mlp(x, indices, weights, jnp.pad(gate_up, pad), jnp.pad(down, pad))


def assert_close(actual, expected, tolerance=TOLERANCE):
    """To a tolerance of the largest expected element; exactly zero where all of it is zero."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())
