"""The embedding's look-up, and where gradients of many tokens are summed: in float32 whatever is computed in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from dreamer_jax.blocks.head import embed, logits_of
from dreamer_jax.blocks.loss import cross_entropy

V, H, T = 7, 3, 1024


def test_look_up():
    """Rows in the compute precision; numbers out of range are clipped, and gradients go where the rows came from."""
    table = jax.random.normal(jax.random.key(0), (V, H))
    found, back = jax.vjp(lambda table: embed(table, jnp.array([[0, 6, 3, -1], [7, 99, 2, -9]]), "bfloat16"), table)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, table.astype(jnp.bfloat16)[jnp.array([[0, 6, 3, 0], [6, 6, 2, 0]])])
    np.testing.assert_array_equal(back(jnp.ones_like(found))[0][:, 0], [3, 0, 1, 1, 0, 0, 3])


def test_a_token_that_occurs_often_gets_its_whole_gradient():
    """1 and then 1023 times 2^-9: a bfloat16 sum would stay at 1, since half its spacing there is 2^-8."""
    d_out = jnp.full((1, T, H), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
    tokens = jnp.full((1, T), 4)
    _, back = jax.vjp(lambda table: embed(table, tokens, "bfloat16"), jnp.zeros((V, H)))
    expected = np.zeros((V, H), np.float32)
    expected[4] = 1 + 1023 / 512
    np.testing.assert_array_equal(back(d_out)[0], expected)


def test_the_head_gets_its_whole_gradient():
    """The same of the loss. Products and sums of the head's gradient are float32 as the program says it, because a CPU
    leaves out roundings to bfloat16 that a TPU makes."""
    hidden, head = jnp.ones((T, H), jnp.bfloat16), jnp.zeros((V, H))
    targets, mask = jnp.zeros(T, jnp.int32), jnp.ones(T, bool)
    gradient = jax.grad(lambda head: cross_entropy(hidden, head, targets, mask))
    of_head = [one for one in equations(jax.make_jaxpr(gradient)(head).jaxpr) if one.outvars[0].aval.shape == (V, H)]
    sums = [one for one in of_head if one.primitive.name in ("dot_general", "add")]
    assert {one.primitive.name for one in sums} == {"dot_general", "add"}
    assert all(one.outvars[0].aval.dtype == jnp.float32 for one in sums)
    np.testing.assert_allclose(gradient(head)[1:], np.full((V - 1, H), T / V), rtol=2**-8)
    assert gradient(head).dtype == jnp.float32


def equations(jaxpr):
    """All of a program, those of loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_logits_are_float32():
    """Of bfloat16 factors, summed and kept in float32."""
    hidden, head = (jax.random.normal(jax.random.key(n), (n, 64)).astype(jnp.bfloat16) for n in (2, 3))
    found = logits_of(hidden, head.astype(jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T, rtol=1e-5)
