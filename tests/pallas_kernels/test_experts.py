"""The expert MLP and the attention MoE's linear map against their definitions: values and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.cpu as linear_cpu
import pallas_kernels.attention_moe.reference as linear_reference
import pallas_kernels.attention_moe.xla as linear_xla
import pallas_kernels.expert_mlp.cpu as mlp_cpu
import pallas_kernels.expert_mlp.reference as mlp_reference
import pallas_kernels.expert_mlp.xla as mlp_xla
from pallas_kernels.dispatch import shares
from pallas_kernels.dispatch.shares import plan_shares, sizes_for
from tests.pallas_kernels.expert_cases import compiled, fresh, normal, with_an_empty_expert

TOKENS, CHOICES, EXPERTS, HIDDEN, SIZE, OUT = 45, 3, 11, 12, 5, 7  # no multiple of a block anywhere
TOLERANCE = 1e-5  # of the largest element, float32 against float32
SELECTIONS = ("random", "one hot", "skewed")


@pytest.fixture(autouse=True)
def a_rest(monkeypatch):
    """Also of so few tokens as are quick to test."""
    monkeypatch.setattr(shares, "ROOMY", 0)


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


MLPS, LINEARS = (mlp_xla.expert_mlp, mlp_cpu.expert_mlp), (linear_xla.expert_linear, linear_cpu.expert_linear)
OPERATIONS = [
    *(pytest.param(each, mlp_case, id=each.__module__) for each in MLPS),
    *(pytest.param(each, linear_case, id=each.__module__) for each in LINEARS),
]


def assert_close(actual, expected, name=""):
    """To TOLERANCE of the largest expected element; exactly zero where all of it is zero."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize(("operation", "case"), OPERATIONS)
def test_equals_its_definition(operation, case, kind):
    """Forward and the gradient in every float argument; unused experts get exactly zero; bitwise repeatable."""
    reference, names = {
        mlp_case: (mlp_reference.expert_mlp, ("x", "weights", "gate_up", "down")),
        linear_case: (linear_reference.expert_linear, ("x", "score", "routed", "shared")),
    }[case]
    indices, floats = case(kind)
    cotangent = normal(9, TOKENS, HIDDEN if case is mlp_case else OUT)
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


@pytest.mark.parametrize("operation", [*LINEARS, linear_reference.expert_linear])
def test_no_shared_expert_is_one_of_zeros(operation):
    """The value and the other gradients."""
    index, (x, score, routed, shared) = linear_case("random")
    g = normal(9, TOKENS, OUT)
    value, gradients = compiled(operation)(index, (x, score, routed, None), g)
    wanted, others = compiled(operation)(index, (x, score, routed, np.zeros_like(shared)), g)
    assert gradients[3] is None
    jax.tree.map(assert_close, (value, gradients[:3]), (wanted, others[:3]))


@pytest.mark.parametrize("operation", LINEARS)
def test_score_gradient_is_not_that_of_eq_8(operation):
    """Plain autodiff of s x (W_e + W_shared) has the same value and a clearly different score gradient."""

    def eq_8(x, index, score, routed, shared):
        return score[:, None] * jnp.einsum("ta,tab->tb", x, (routed + shared)[index])

    index, floats = linear_case("random")
    g = normal(9, TOKENS, OUT)
    value, gradients = compiled(operation)(index, floats, g)
    naive_value, naive = compiled(eq_8)(index, floats, g)
    assert_close(value, naive_value)
    assert np.linalg.norm(gradients[1] - naive[1]) > 0.5 * np.linalg.norm(gradients[1])
    for ours, same in zip(gradients[:1] + gradients[2:], naive[:1] + naive[2:], strict=True):
        assert_close(ours, same)  # everything but the score


@pytest.mark.parametrize(("operation", "case"), OPERATIONS)
def test_tokens_do_not_meet(operation, case):
    """Permuting the tokens permutes the outputs, whoever shares a block with whom."""
    indices, (x, weight, *matrices) = case("skewed")
    order = np.random.default_rng(0).permutation(TOKENS)
    run = jax.jit(operation)
    assert_close(run(x[order], indices[order], weight[order], *matrices), run(x, indices, weight, *matrices)[order])


@pytest.mark.parametrize(("operation", "case"), OPERATIONS)
def test_what_is_no_number_stays_in_its_token(operation, case):
    """Forward, and backward to the tokens: a share that is full reads rows of others for the pairs that it has no room
    for. All but the last token go to one expert."""
    chosen, (x, *others) = case("one hot")
    chosen = jnp.asarray(chosen).at[-1].add(3)

    @jax.jit
    def both(x, chosen, others):
        out, back = jax.vjp(lambda x: operation(x, chosen, *others), x)
        return out, *back(jnp.ones_like(out))

    for damaged in (TOKENS - 1, 0):
        out, d_x = both(jnp.asarray(x).at[damaged].set(jnp.nan), chosen, others)
        assert np.isnan(out[damaged]).any()
        for rows in (out, d_x):
            assert np.isfinite(np.delete(rows, damaged, axis=0)).all()


@pytest.mark.parametrize(("operation", "case"), OPERATIONS)
def test_bfloat16(operation, case):
    """Result and gradients in the arguments' own dtypes, close to float32."""
    indices, (x, weight, *matrices) = case("random")
    cotangent = normal(9, TOKENS, HIDDEN if case is mlp_case else OUT)
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


@pytest.mark.parametrize("absent", [0.3, 1.0])
def test_pairs_without_an_expert_on_a_cpu(absent):
    """They add nothing and get no gradient, as an expert's whose outputs are zero; all of them, too."""
    indices, floats = mlp_case("skewed")
    indices = np.where(normal(5, *indices.shape) < np.quantile(normal(5, *indices.shape), absent), EXPERTS, indices)
    if absent == 1.0:
        indices[:] = EXPERTS
    cotangent = normal(9, TOKENS, HIDDEN)
    value, gradients = compiled(mlp_cpu.expert_mlp)(indices, floats, cotangent)
    expected, expected_gradients = compiled(with_an_empty_expert)(indices, floats, cotangent)
    jax.tree.map(assert_close, (value, gradients), (expected, expected_gradients))


@pytest.mark.parametrize(("operation", "case", "rows"), [(MLPS[1], mlp_case, 80), (LINEARS[1], linear_case, 20)])
def test_the_rest_goes_in_groups(operation, case, rows, monkeypatch):
    """Several of them, of which the last overlaps with the one before: nothing is left out or added twice."""
    indices, floats = case("one hot")
    cotangent = normal(9, TOKENS, HIDDEN if case is mlp_case else OUT)
    expected = compiled(operation)(indices, floats, cotangent)  # as one group
    monkeypatch.setattr(shares, "GROUP_ROWS", rows)
    plan = jax.tree.map(np.asarray, plan_shares(jnp.asarray(indices.reshape(TOKENS, -1)), EXPERTS))
    size = rows // plan.rest.shape[1]
    assert 1 < size < plan.used and len(plan.rest) % size and plan.used > len(plan.rest) // size * size
    jax.tree.map(assert_close, fresh(operation)(indices, floats, cotangent), expected)


@pytest.mark.parametrize(("operation", "case"), [(MLPS[1], mlp_case), (LINEARS[1], linear_case)])
def test_few_tokens_leave_no_rest(operation, case, monkeypatch):
    """Every expert has room for all of them, also where all choose the same ones."""
    indices, floats = case("one hot")
    cotangent = normal(9, TOKENS, HIDDEN if case is mlp_case else OUT)
    expected = compiled(operation)(indices, floats, cotangent)
    monkeypatch.setattr(shares, "ROOMY", TOKENS * EXPERTS)
    plan = plan_shares(jnp.asarray(indices.reshape(TOKENS, -1)), EXPERTS)
    assert plan.share.shape == (EXPERTS, TOKENS) and not len(plan.rest)
    assert bool(plan.here.all())
    jax.tree.map(assert_close, fresh(operation)(indices, floats, cotangent), expected)


@pytest.mark.parametrize(("tokens", "experts"), [(45, 11), (45, 3), (300, 11), (7, 11)])
@pytest.mark.parametrize("kind", SELECTIONS)
def test_every_pair_has_one_place(kind, tokens, experts):
    """In its expert's share or in a block of its expert's, and blocks that are used come first."""
    heat = {"random": 0, "skewed": np.arange(experts), "one hot": 99 * np.arange(experts)}[kind]
    indices = np.argsort(normal(3, tokens, experts) - heat, axis=1)[:, :CHOICES].astype(np.int32)
    plan = jax.tree.map(np.asarray, jax.jit(plan_shares, static_argnums=1)(indices, experts))
    expert = np.append(indices.reshape(-1), -1)  # of each pair, and of padding
    held = np.concatenate([plan.share.reshape(-1), plan.rest.reshape(-1)])
    assert sorted(held[held < indices.size]) == list(range(indices.size))
    for rows, owners in ((plan.share, np.arange(experts)), (plan.rest, plan.rest_expert)):
        assert np.all((expert[rows] == owners[:, None]) | (expert[rows] == -1))
    for pair, place in enumerate(plan.place.reshape(-1)):
        assert place == plan.share.size or plan.share.reshape(-1)[place] == pair
    filled = np.any(plan.rest < indices.size, axis=1)
    assert np.array_equal(filled, np.arange(len(plan.rest)) < plan.used)
    size, block = sizes_for(*indices.shape, experts)
    assert plan.share.shape == (experts, size) and (not len(plan.rest) or plan.rest.shape[1] == block <= size)
