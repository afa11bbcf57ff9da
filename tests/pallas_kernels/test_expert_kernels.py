"""The experts' kernels, interpreted, against their definitions: values, every gradient, and the tape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels.attention_moe.reference as linear_reference
import pallas_kernels.expert_mlp.reference as mlp_reference
from pallas_kernels import expert_mlp as mlp
from pallas_kernels import tiles
from pallas_kernels.attention_moe import expert_linear
from pallas_kernels.attention_moe.shapes import Tiles as LinearTiles
from pallas_kernels.dispatch import api as dispatch
from pallas_kernels.expert_mlp.shapes import Tiles, unsupported

TOKENS, CHOICES, EXPERTS, SIZE, HIDDEN = 23, 3, 6, 24, 128  # 69 rows in blocks of 16: no multiple of one
SELECTIONS = ("random", "one hot", "some elsewhere", "all elsewhere")
TOLERANCE = 1e-5


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


def mlp_floats(dtype=np.float32):
    """x, weights, gate_up, down."""
    matrices = normal(2, EXPERTS, 2 * SIZE, HIDDEN) * 0.3, normal(4, EXPERTS, SIZE, HIDDEN) * 0.3
    floats = (normal(0, TOKENS, HIDDEN), np.abs(normal(1, TOKENS, CHOICES)), *matrices)
    return tuple(jnp.asarray(a, jnp.float32 if n == 1 else dtype) for n, a in enumerate(floats))


def linear_floats(dtype=np.float32):
    """x, score, routed, shared."""
    floats = normal(0, TOKENS, 128), np.abs(normal(1, TOKENS)), normal(2, EXPERTS, 128, 256), normal(4, 128, 256)
    return tuple(jnp.asarray(a, jnp.float32 if n == 1 else dtype) for n, a in enumerate(floats))


@functools.cache
def compiled(operation):
    """(indices, floats, cotangent) -> (value, gradients in all floats)."""

    def run(indices, floats, cotangent):
        value, vjp = jax.vjp(lambda x, weight, *matrices: operation(x, indices, weight, *matrices), *floats)
        return value, vjp(cotangent)

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


@pytest.mark.parametrize("kind", SELECTIONS)
def test_mlp(kind):
    """Value and gradients; pairs without an expert add nothing and get nothing; empty experts get exactly zero."""
    indices, cotangent = choose(kind, CHOICES), normal(9, TOKENS, HIDDEN)
    value, gradients = compiled(mlp.expert_mlp)(indices, mlp_floats(), cotangent)
    expected, expected_gradients = compiled(with_an_empty_expert)(indices, mlp_floats(), cotangent)
    assert_close(value, expected)
    jax.tree.map(assert_close, gradients, expected_gradients)
    unused = np.setdiff1d(np.arange(EXPERTS), indices)
    assert not np.any(np.asarray(gradients[2])[unused]) and (kind != "one hot" or len(unused) == 3)


@pytest.mark.parametrize("kind", ["random", "one hot"])
def test_linear(kind):
    """Value and gradients, with Eq. 7's gradient of the score."""
    index, cotangent = choose(kind, 1)[:, 0], normal(9, TOKENS, 256)
    ours = compiled(expert_linear)(index, linear_floats(), cotangent)
    jax.tree.map(assert_close, ours, compiled(linear_reference.expert_linear)(index, linear_floats(), cotangent))


@pytest.mark.parametrize(
    ("operation", "reference", "floats", "choices"),
    [
        (mlp.expert_mlp, mlp_reference.expert_mlp, mlp_floats, CHOICES),
        (expert_linear, linear_reference.expert_linear, linear_floats, 1),
    ],
    ids=["mlp", "linear"],
)
@pytest.mark.slow
def test_bfloat16(operation, reference, floats, choices):
    """Results in the arguments' dtypes, to bfloat16's rounding of the float32 definition."""
    indices = choose("random", choices) if choices > 1 else choose("random", 1)[:, 0]
    half = floats(jnp.bfloat16)
    cotangent = jnp.asarray(normal(9, TOKENS, half[-1].shape[-1]), jnp.bfloat16)
    ours = compiled(operation)(indices, half, cotangent)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    exact = compiled(reference)(indices, wide, cotangent.astype(jnp.float32))
    for got, wanted, dtype in zip(
        (ours[0], *ours[1]), (exact[0], *exact[1]), (jnp.bfloat16, *map(_dtype, half)), strict=True
    ):
        assert got.dtype == dtype
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.01 * np.linalg.norm(wanted)


def _dtype(array):
    return array.dtype


@functools.cache
def on_tape():
    """One depth of the backward scan: (indices, floats, cotangent, tape) -> (d_x, d_weights, tape)."""

    def run(indices, floats, cotangent, tape):
        x, weights, gate_up, down = floats

        def operation(x, weights, tape):
            return mlp.expert_mlp(x, indices, weights, gate_up, down, tape)

        return jax.vjp(operation, x, weights, tape)[1](cotangent)

    return jax.jit(run)


@pytest.mark.parametrize("depths", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_tape(depths):
    """The sum over several depths, added at every one or a few at a time, the last time fewer."""
    floats = mlp_floats()
    tape = mlp.start_tape((TOKENS, CHOICES), floats[2].shape, jnp.float32, depths)
    sums = [0, 0]
    for depth in range(4):
        indices, cotangent = choose("some elsewhere", CHOICES, seed=depth), normal(depth, TOKENS, HIDDEN)
        d_x, d_weights, tape = on_tape()(indices, floats, cotangent, tape)
        expected = compiled(with_an_empty_expert)(indices, floats, cotangent)[1]
        assert_close(d_x, expected[0])
        assert_close(d_weights, expected[1])
        sums = [total + d for total, d in zip(sums, expected[2:], strict=True)]
        if depth % tape.depths == tape.depths - 1 or depth == 3:
            tape = jax.jit(mlp.settle)(tape)
    assert tape.depths == depths
    assert_close(tape.gate_up, sums[0])
    assert_close(tape.down, sums[1])


def test_counting_sort():
    """The slots that the counting kernel finds are those of the sort, pairs without an expert included."""
    for pairs, experts, block in ((600, 11, 8),):
        chosen = jnp.asarray(np.random.default_rng(pairs).integers(0, experts + 1, pairs), jnp.int32)
        sorted_slots, blocks = dispatch._slots_by_sorting(chosen, experts, block)
        counted_slots, counted_blocks = dispatch._slots_by_counting(chosen, experts, block)
        np.testing.assert_array_equal(counted_slots, sorted_slots)
        np.testing.assert_array_equal(counted_blocks, blocks)
        plan = dispatch.plan_dispatch(chosen[:, None], experts, block)
        assert np.all(np.asarray(plan.source).reshape(-1)[np.asarray(plan.slot)[chosen == experts]] == pairs)


@pytest.mark.slow
def test_races():
    """Two cores at once, memory uninitialised: the race detector finds nothing, and the results are the same."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    indices, cotangent = choose("some elsewhere", CHOICES), normal(9, TOKENS, HIDDEN)
    with pltpu.force_tpu_interpret_mode(params):
        value, gradients = compiled.__wrapped__(lambda *a: mlp.expert_mlp(*a))(indices, mlp_floats(), cotangent)
        jax.block_until_ready(gradients)
        assert not interpreter.races.races_found
        index, cotangent_linear = choose("random", 1)[:, 0], normal(9, TOKENS, 256)
        linear = compiled.__wrapped__(lambda *a: expert_linear(*a))(index, linear_floats(), cotangent_linear)
        jax.block_until_ready(linear)
        assert not interpreter.races.races_found
    expected = compiled(with_an_empty_expert)(indices, mlp_floats(), cotangent)
    jax.tree.map(assert_close, (value, gradients), expected)


@settings(max_examples=6)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(3, 9), st.sampled_from([8, 24]), st.integers(0, 99))
@pytest.mark.slow
def test_random_shapes(tokens, choices, experts, size, seed):
    """Any number of tokens, choices and experts."""
    rng = np.random.default_rng(seed)
    indices = np.argsort(rng.normal(size=(tokens, experts)) * [5, *[1] * (experts - 1)], axis=1)[:, :choices]
    shapes = (tokens, HIDDEN), (tokens, choices), (experts, 2 * size, HIDDEN), (experts, size, HIDDEN)
    floats = tuple(jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32) for shape in shapes)
    cotangent = jnp.asarray(rng.normal(size=(tokens, HIDDEN)), jnp.float32)
    arguments = indices.astype(np.int32), floats, cotangent
    jax.tree.map(assert_close, compiled(mlp.expert_mlp)(*arguments), compiled(mlp_reference.expert_mlp)(*arguments))


def test_falls_back(caplog):
    """What no kernel takes is computed all the same, with one line that says why; and has no tape."""
    floats = tuple(a[..., :12] if n != 1 else a for n, a in enumerate(mlp_floats()))
    indices = choose("random", CHOICES)
    for _ in range(2):
        value = mlp.expert_mlp(floats[0], indices, *floats[1:])
    assert_close(value, mlp_reference.expert_mlp(floats[0], indices, *floats[1:]))
    assert [r.message for r in caplog.records if "no multiple of 128" in r.message] == [
        "expert MLP without a kernel: a hidden size of 12 is no multiple of 128"
    ]
    assert mlp.start_tape((TOKENS, CHOICES), floats[2].shape, jnp.float32) is None


@pytest.mark.parametrize("chip", tiles.GENERATIONS)
def test_the_papers_shapes_have_tiles(chip):
    """All four models' experts fit every generation; larger blocks come with more rows an expert."""
    target = tiles.GENERATIONS[chip]
    for experts, size in ((537, 480), (1097, 472), (517, 504), (1039, 504)):
        assert unsupported((32768, 8), (experts, 2 * size, 1024), jnp.bfloat16, target) is None
        few, many = (Tiles.of(rows, experts, size, 1024, jnp.bfloat16, target) for rows in (experts * 30, 262144))
        assert few.block == 32 and many.block == 128
        assert 1024 % many.columns == 0 and many.columns % 128 == 0
    for shape in ((32, 1024, 4096), (32, 2048, 1024), (32, 1024, 384), (32, 128, 1024)):
        assert LinearTiles.of(32768, shape, jnp.bfloat16, target) is not None
    assert "fit" in unsupported((32768, 8), (4, 2 * 65536, 1024), jnp.bfloat16, target)
