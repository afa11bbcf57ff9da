"""bfloat16 compute: close to float32, finite, and float32 where it has to be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from dreamer_jax.families import build
from dreamer_jax.families.contract import depth_of
from tests.families import numpy_reference
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    apply,
    cross_entropy,
    random_tokens,
    random_weights,
    small_config,
)


def deciding_bias(bias):
    """Biases so far apart that rounding can't change a selection: what differs below is arithmetic alone."""
    rng = np.random.default_rng(1)
    return {name: 20.0 * rng.permuted(np.indices(b.shape)[-1], axis=-1).astype(np.float32) for name, b in bias.items()}


@functools.cache
def loss_and_gradient(dtype):
    """((loss, output), gradients) of one batch."""
    config = small_config("DR+DA", dtype=dtype)
    params, bias = random_weights(small_config("DR+DA"))
    tokens = random_tokens(config)

    def loss(params):
        output = apply(config, params, deciding_bias(bias), tokens, SEGMENT_IDS, POSITIONS)
        return cross_entropy(output.logits, jnp.roll(tokens, -1, axis=1), jnp.asarray(REAL)), output

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def distance(actual, expected):
    """Norm of the difference over the norm of the expected."""
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    """Logits and every parameter's gradient; float32 outside, really bfloat16 inside."""
    (_, output), gradient = loss_and_gradient("bfloat16")
    (_, expected), expected_gradient = loss_and_gradient("float32")
    jax.tree.map(np.testing.assert_array_equal, output.counts, expected.counts)
    assert output.logits.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(output.logits)))
    assert 1e-4 < distance(output.logits[REAL], expected.logits[REAL]) < 0.03
    for path, wanted in jax.tree_util.tree_leaves_with_path(expected_gradient):
        got = functools.reduce(lambda tree, key: tree[key.key], path, gradient)
        assert got.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(got)))
        assert distance(got, wanted) < 0.15, jax.tree_util.keystr(path)


def equations(jaxpr):
    """All equations, those of inner loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("variant", ["LA+DA", "DR+DA"])
def test_statistics_softmax_and_selection_are_float32(variant):
    """Of the bfloat16 program: every exponential (softmax), inverse root (norms) and top-k works on float32."""
    config = small_config(variant, dtype="bfloat16")
    params, bias = jax.tree.map(jnp.asarray, random_weights(small_config(variant)))

    def run(tokens):
        return apply(config, params, bias, tokens, SEGMENT_IDS, POSITIONS)

    seen = {"exp": 0, "rsqrt": 0, "top_k": 0, "cos": 0}
    products = set()
    for equation in equations(jax.make_jaxpr(run)(random_tokens(config)).jaxpr):
        name = equation.primitive.name
        if name in seen:
            seen[name] += 1
            assert equation.invars[0].aval.dtype == jnp.float32, equation
        if name == "dot_general":
            products.add(equation.invars[0].aval.dtype)
    assert all(seen.values()), seen
    assert jnp.dtype(jnp.bfloat16) in products  # the matrix products are what bfloat16 is for


def test_the_compute_copy_keeps_norms_and_router_keys():
    """Only matrices are rounded; a norm's scale and the keys that decide the routing are not."""
    config = small_config("DR+DA", dtype="bfloat16")
    params = jax.tree.map(jnp.asarray, random_weights(small_config("DR+DA"))[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(build(config).cast(params)):
        kept = path[-1].key in ("scale", "keys")
        assert leaf.dtype == (jnp.float32 if kept else jnp.bfloat16), jax.tree_util.keystr(path)


def test_router_logits_are_float32():
    """From bfloat16 inputs on, nothing of the routing is rounded to bfloat16."""
    config = small_config("DR+DA", dtype="bfloat16")
    weights = random_weights(small_config("DR+DA"))[0]["layer"]["expert_attention"]["router"]
    weights = {**weights, "query": np.asarray(jnp.asarray(weights["query"], jnp.bfloat16), np.float32)}
    x = jax.random.normal(jax.random.key(0), (20, config.hidden_size)).astype(jnp.bfloat16)
    router = build(config).routers["expert_attention"]
    logits = router.apply({"params": weights}, x, depth_of(1, 3))
    reference = numpy_reference.Pass(config, {}, {}, 3)
    expected = reference.router_logits(numpy_reference.float64(weights), np.asarray(x, np.float64), 1)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
