"""The expert MLP and the attention MoE's linear map against their definitions: values and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.reference as linear_reference
import pallas_kernels.expert_mlp.reference as mlp_reference
from pallas_kernels.attention_moe.xla import expert_linear
from pallas_kernels.expert_mlp.xla import expert_mlp
from tests.pallas_kernels.expert_cases import compiled, normal

TOKENS, CHOICES, EXPERTS, HIDDEN, SIZE, OUT = 45, 3, 11, 12, 5, 7  # no multiple of a block anywhere
TOLERANCE = 1e-5  # of the largest element, float32 against float32
SELECTIONS = ("random", "one hot", "skewed")


def choose(kind, choices):
    """[T, choices] int32, different within a token. "one hot" leaves all experts but `choices` without a token."""
    if kind == "one hot":
        return np.broadcast_to(np.arange(choices) + 2, (TOKENS, choices)).astype(np.int32)
    heat = np.arange(EXPERTS) if kind == "skewed" else np.zeros(EXPERTS)
    return np.argsort(normal(3, TOKENS, EXPERTS) - heat, axis=1)[:, :choices].astype(np.int32)


def mlp_case(kind):
    """Integer and float arguments of expert_mlp."""
    weights = np.abs(normal(1, TOKENS, CHOICES))
    floats = (
        normal(0, TOKENS, HIDDEN),
        weights,
        normal(2, EXPERTS, 2 * SIZE, HIDDEN),
        normal(4, EXPERTS, SIZE, HIDDEN),
    )
    return choose(kind, CHOICES), floats


def linear_case(kind):
    """Integer and float arguments of expert_linear."""
    score = np.abs(normal(1, TOKENS))
    floats = (normal(0, TOKENS, HIDDEN), score, normal(2, EXPERTS, HIDDEN, OUT), normal(4, HIDDEN, OUT))
    return choose(kind, 1)[:, 0], floats


def assert_close(actual, expected, name=""):
    """To TOLERANCE of the largest expected element; exactly zero where all of it is zero."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize(
    ("operation", "reference", "case", "names"),
    [
        (expert_mlp, mlp_reference.expert_mlp, mlp_case, ("x", "weights", "gate_up", "down")),
        (expert_linear, linear_reference.expert_linear, linear_case, ("x", "score", "routed", "shared")),
    ],
    ids=["expert_mlp", "expert_linear"],
)
def test_equals_its_definition(operation, reference, case, names, kind):
    """Forward and the gradient in every float argument; unused experts get exactly zero; bitwise repeatable."""
    indices, floats = case(kind)
    cotangent = normal(9, TOKENS, HIDDEN if operation is expert_mlp else OUT)
    value, gradients = compiled(operation)(indices, floats, cotangent)
    expected, expected_gradients = compiled(reference)(indices, floats, cotangent)
    assert_close(value, expected, "value")
    for name, actual, wanted in zip(names, gradients, expected_gradients, strict=True):
        assert_close(actual, wanted, name)
    unused = np.setdiff1d(np.arange(EXPERTS), indices)
    assert not np.any(np.asarray(gradients[2])[unused])
    if kind == "one hot":
        assert len(unused) == EXPERTS - indices[0].size

    again = compiled(operation)(indices, floats, cotangent)
    jax.tree.map(np.testing.assert_array_equal, again, (value, gradients))


def test_definition_of_the_expert_mlp():
    """The reference itself, by loops in float64: gate before up, weights outside."""
    indices, (x, weights, gate_up, down) = mlp_case("random")
    expected = np.zeros((TOKENS, HIDDEN))
    for t in range(TOKENS):
        for weight, e in zip(weights[t], indices[t], strict=True):
            gate, up = np.split(gate_up[e].astype(np.float64) @ x[t], 2)
            expected[t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    assert_close(mlp_reference.expert_mlp(x, indices, weights, gate_up, down), expected.astype(np.float32))


def test_definition_of_the_expert_linear():
    """Eq. 7 by a loop; its score gradient sees the routed expert alone: <x W_e, g>."""
    index, (x, score, routed, shared) = linear_case("random")
    g = normal(9, TOKENS, OUT)
    value, (_, d_score, _, d_shared) = compiled(linear_reference.expert_linear)(index, (x, score, routed, shared), g)
    rows = [score[t] * (x[t] @ routed[e] + x[t] @ shared) for t, e in enumerate(index)]
    assert_close(value, np.stack(rows))
    assert_close(d_score, np.array([x[t] @ routed[e] @ g[t] for t, e in enumerate(index)], np.float32))
    assert_close(d_shared, x.T @ (score[:, None] * g))


@pytest.mark.parametrize("operation", [expert_linear, linear_reference.expert_linear])
def test_no_shared_expert_is_one_of_zeros(operation):
    """The value and the other gradients."""
    index, (x, score, routed, shared) = linear_case("random")
    g = normal(9, TOKENS, OUT)
    value, gradients = compiled(operation)(index, (x, score, routed, None), g)
    wanted, others = compiled(operation)(index, (x, score, routed, np.zeros_like(shared)), g)
    assert gradients[3] is None
    jax.tree.map(assert_close, (value, gradients[:3]), (wanted, others[:3]))


def test_score_gradient_is_not_that_of_eq_8():
    """Plain autodiff of s x (W_e + W_shared) has the same value and a clearly different score gradient."""

    def eq_8(x, index, score, routed, shared):
        return score[:, None] * jnp.einsum("ta,tab->tb", x, (routed + shared)[index])

    index, floats = linear_case("random")
    g = normal(9, TOKENS, OUT)
    value, gradients = compiled(expert_linear)(index, floats, g)
    naive_value, naive = compiled(eq_8)(index, floats, g)
    assert_close(value, naive_value)
    assert np.linalg.norm(gradients[1] - naive[1]) > 0.5 * np.linalg.norm(gradients[1])
    for ours, same in zip(gradients[:1] + gradients[2:], naive[:1] + naive[2:], strict=True):
        assert_close(ours, same)  # everything but the score


@pytest.mark.parametrize(("operation", "case"), [(expert_mlp, mlp_case), (expert_linear, linear_case)])
def test_tokens_do_not_meet(operation, case):
    """Permuting the tokens permutes the outputs, whoever shares a block with whom."""
    indices, (x, weight, *matrices) = case("skewed")
    order = np.random.default_rng(0).permutation(TOKENS)
    run = jax.jit(operation)
    assert_close(run(x[order], indices[order], weight[order], *matrices), run(x, indices, weight, *matrices)[order])


@pytest.mark.parametrize(("operation", "case"), [(expert_mlp, mlp_case), (expert_linear, linear_case)])
def test_bfloat16(operation, case):
    """Result and gradients in the arguments' own dtypes, close to float32."""
    indices, (x, weight, *matrices) = case("random")
    cotangent = normal(9, TOKENS, HIDDEN if operation is expert_mlp else OUT)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, *matrices)]
    floats = (half[0], jnp.asarray(weight), *half[1:])
    value, gradients = compiled(operation)(indices, floats, jnp.asarray(cotangent, jnp.bfloat16))
    wide = tuple(jnp.asarray(a, jnp.float32) for a in floats)
    expected = compiled(operation)(indices, wide, jnp.asarray(cotangent, jnp.bfloat16).astype(jnp.float32))
    for got, wanted, dtype in zip(
        (value, *gradients), (expected[0], *expected[1]), (jnp.bfloat16, *(a.dtype for a in floats)), strict=True
    ):
        assert got.dtype == dtype
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.02 * np.linalg.norm(wanted)
