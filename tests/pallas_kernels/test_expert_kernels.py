"""The experts' kernels, interpreted, against their definitions: values, every gradient, and the tape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels.attention_moe.reference as linear_reference
import pallas_kernels.expert_mlp.reference as mlp_reference
from pallas_kernels import backend, tiles
from pallas_kernels.attention_moe.shapes import Tiles as LinearTiles
from pallas_kernels.dispatch import api as dispatch
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.expert_mlp.shapes import Tiles, unsupported
from tests.pallas_kernels.expert_cases import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    LINEAR,
    MLP,
    SELECTIONS,
    SIZE,
    TOKENS,
    assert_close,
    compiled,
    fresh,
    halves_case,
    linear_case,
    linear_halves_case,
    mlp_case,
    normal,
    on_tape,
    with_an_empty_expert,
)
from tests.pallas_kernels.interpreting import operations_outside_kernels


@pytest.mark.parametrize("kind", SELECTIONS)
def test_mlp(kind):
    """Value and gradients; pairs without an expert add nothing and get nothing; empty experts get exactly zero."""
    indices, floats, cotangent = mlp_case(kind)
    value, gradients = compiled(MLP)(indices, floats, cotangent)
    jax.tree.map(assert_close, (value, gradients), compiled(with_an_empty_expert)(indices, floats, cotangent))
    unused = np.setdiff1d(np.arange(EXPERTS), indices)
    assert not np.any(np.asarray(gradients[2])[unused]) and (kind != "one hot" or len(unused) == 3)


@pytest.mark.parametrize(("form", "int8"), [("pallas", False), ("pallas", True), ("xla", False)])
def test_what_is_no_number_stays_in_its_token(form, int8):
    """Also where a token's expert is another device's: its place is padding, which holds the last token's row, and
    every block is used."""
    operation = ExpertMLP(form, int8=int8)
    matrices = normal(2, 2, 32, HIDDEN), normal(4, 2, 16, HIDDEN)
    kept = operation.arrange(*matrices) if int8 else matrices
    x = jnp.asarray(normal(0, 3, HIDDEN)).at[-1].set(jnp.nan)
    out = jax.jit(operation)(x, np.array([[2], [0], [1]], np.int32), np.ones((3, 1), np.float32), *kept)
    assert not np.any(np.asarray(out)[0]) and np.all(np.isfinite(out[1])) and np.all(np.isnan(out[2]))


@pytest.mark.slow
def test_blocks_filled_to_a_half():
    """Half of a block is computed where the other half is empty: values and gradients are the same, on the tape too."""
    case = halves_case()
    indices, floats = case[:2]
    assert Tiles.of(indices.size, EXPERTS, SIZE, HIDDEN, jnp.float32, tiles.INTERPRETED).block == 32
    value, gradients = compiled(with_an_empty_expert)(*case)
    jax.tree.map(assert_close, compiled(MLP)(*case), (value, gradients))
    tape = ExpertMLP("pallas", 2).start_tape(indices.shape, floats[2].shape, jnp.float32)
    d_x, d_weights, tape = on_tape()(*case, tape)
    tape = jax.jit(lambda tape: tape.settle())(tape)
    ours = d_x, d_weights, tape.gradients()["gate_up"], tape.gradients()["down"]
    jax.tree.map(assert_close, ours, gradients)


@pytest.mark.parametrize("kind", ["random", "one hot"])
def test_linear(kind):
    """Value and gradients, with Eq. 7's gradient of the score."""
    case = linear_case(kind)
    jax.tree.map(assert_close, compiled(LINEAR)(*case), compiled(linear_reference.expert_linear)(*case))


def test_linear_blocks_filled_to_a_half():
    """As whole ones."""
    case = linear_halves_case()
    routed = case[1][2]
    assert LinearTiles.of(len(case[0]), routed.shape, jnp.float32, tiles.INTERPRETED).block == 32
    jax.tree.map(assert_close, compiled(LINEAR)(*case), compiled(linear_reference.expert_linear)(*case))


@pytest.mark.parametrize(
    ("operation", "reference", "case"),
    [
        (MLP, mlp_reference.expert_mlp, mlp_case),
        (LINEAR, linear_reference.expert_linear, linear_case),
    ],
    ids=["mlp", "linear"],
)
@pytest.mark.parametrize("kind", ["random", "one hot"])
@pytest.mark.slow
def test_bfloat16(operation, reference, case, kind):
    """Results in the arguments' dtypes, to bfloat16's rounding of the float32 definition."""
    indices, half, cotangent = case(kind, dtype=jnp.bfloat16)
    ours = compiled(operation)(indices, half, cotangent)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    exact = compiled(reference)(indices, wide, cotangent.astype(jnp.float32))
    for got, wanted, like in zip((ours[0], *ours[1]), (exact[0], *exact[1]), (half[0], *half), strict=True):
        assert got.dtype == like.dtype
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.slow_but("1-1-0")
@pytest.mark.parametrize(("depths", "group", "settled"), [(1, 1, 0), (3, 4, 2), (3, 1, 1)])
def test_tape(depths, group, settled):
    """The sum over several depths, added at every one or a few at a time: as many as there is room for, which is fewer
    where much more than a group's share of the tokens comes."""
    one_depth, floats = on_tape(), mlp_case("random")[1]
    tape = ExpertMLP("pallas", depths).start_tape((TOKENS, CHOICES), floats[2].shape, jnp.float32, group)
    make_room = jax.jit(lambda tape: tape.make_room())
    sums, times = [0, 0], 0
    for depth in range(5):
        indices, _, cotangent = mlp_case("some elsewhere", seed=depth)
        filled, tape = int(tape.first_block), make_room(tape)
        times += filled > 0 and int(tape.first_block) == 0
        d_x, d_weights, tape = one_depth(indices, floats, cotangent, tape)
        expected = compiled(with_an_empty_expert)(indices, floats, cotangent)[1]
        assert_close(d_x, expected[0])
        assert_close(d_weights, expected[1])
        sums = [total + d for total, d in zip(sums, expected[2:], strict=True)]
    tape = jax.jit(lambda tape: tape.settle())(tape)
    assert tape.every == depths and times == settled
    assert_close(tape.gradients()["gate_up"], sums[0])
    assert_close(tape.gradients()["down"], sums[1])


@pytest.mark.slow
@pytest.mark.parametrize("depths", [1, 2])
def test_gate_and_up_computed_again(depths):
    """Bit for bit what is kept gives: gradients without a tape, and on one that adds at once or keeps aside."""
    again = ExpertMLP("pallas", depths, recompute=True)
    indices, floats, cotangent = mlp_case("some elsewhere", dtype=jnp.bfloat16)
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    if depths == 1:
        same(fresh(again)(indices, floats, cotangent), compiled(MLP)(indices, floats, cotangent))
    tapes = [again.start_tape((TOKENS, CHOICES), floats[2].shape, jnp.bfloat16)] * 2
    for seed in range(2):
        indices, _, cotangent = mlp_case("random", seed=seed, dtype=jnp.bfloat16)
        found = [on_tape(mlp)(indices, floats, cotangent, tape) for mlp, tape in zip((MLP, again), tapes, strict=True)]
        same(found[0][:2], found[1][:2])
        tapes = [its[2] for its in found]
    same(*[jax.jit(lambda tape: tape.settle().gradients())(tape) for tape in tapes])


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
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", ["some elsewhere", "one hot"])
def test_tiles_of_columns(kind):
    """Columns in two tiles, as chips with little vector memory need them: every tile walks all blocks again."""
    case = mlp_case(kind, hidden=512)
    jax.tree.map(assert_close, fresh(MLP)(*case), compiled(with_an_empty_expert)(*case))
    case = linear_case("one hot" if kind == "one hot" else "random", inward=256)
    jax.tree.map(assert_close, fresh(LINEAR)(*case), compiled(linear_reference.expert_linear)(*case))


def test_rows_move_by_gathers():
    """Forward and backward, on the tape or without: only integers are scattered, no row is."""
    indices, floats, cotangent = mlp_case("some elsewhere")
    tape = ExpertMLP("pallas", 2).start_tape((TOKENS, CHOICES), floats[2].shape, jnp.float32)
    index, linear, d_out = linear_case("random")
    programs = [
        jax.make_jaxpr(fresh(MLP))(indices, floats, cotangent),
        jax.make_jaxpr(on_tape())(indices, floats, cotangent, tape),
        jax.make_jaxpr(fresh(LINEAR))(index, linear, d_out),
    ]
    for program in programs:
        found = list(operations_outside_kernels(program.jaxpr))
        scattered = {kind for name, kind in found if name.startswith("scatter")}
        assert scattered and all(kind.startswith(("i32", "u32")) for kind in scattered)
        assert [kind for name, kind in found if name == "gather" and kind.startswith("f32")]


@settings(max_examples=12)
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
    jax.tree.map(assert_close, compiled(MLP)(*arguments), compiled(mlp_reference.expert_mlp)(*arguments))


@settings(max_examples=8)
@given(
    st.integers(1, 70), st.integers(1, 9), st.sampled_from([128, 256]), st.sampled_from([0, 1, 5]), st.integers(0, 99)
)
@pytest.mark.slow
def test_random_shapes_of_linear_experts(tokens, experts, outward, heat, seed):
    """Any number of tokens and experts, evenly chosen or hardly."""
    rng = np.random.default_rng(seed)
    index = np.argmax(rng.gumbel(size=(tokens, experts)) + heat * rng.normal(size=experts), axis=1).astype(np.int32)
    shapes = (tokens, 128), (tokens,), (experts, 128, outward), (128, outward)
    floats = tuple(jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32) for shape in shapes)
    arguments = index, floats, jnp.asarray(rng.normal(size=(tokens, outward)), jnp.float32)
    jax.tree.map(assert_close, compiled(LINEAR)(*arguments), compiled(linear_reference.expert_linear)(*arguments))


@settings(max_examples=15)
@given(
    st.sampled_from([(256, 16, 8), (600, 11, 8), (1, 1, 8), (513, 33, 16), (90, 200, 8)]),
    st.sampled_from([0, 1, 5, 50]),
    st.integers(0, 99),
)
@pytest.mark.slow
def test_counting_sort_of_random_selections(shape, heat, seed):
    """Chunks and experts that fill registers or don't; hot, empty and foreign experts."""
    pairs, experts, block = shape
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(pairs, experts + 1)) + heat * rng.normal(size=experts + 1)
    chosen = jnp.asarray(np.argmax(scores, axis=1), jnp.int32)
    counted, sorted_ = (form(experts, block)(chosen) for form in (counting, sorting))
    jax.tree.map(np.testing.assert_array_equal, counted, sorted_)


@functools.cache
def counting(experts, block):
    """Compiled: experts of pairs -> (slots, blocks of each expert)."""
    return jax.jit(lambda chosen: dispatch._slots_by_counting(chosen, experts, block))


@functools.cache
def sorting(experts, block):
    """The same by a sort."""
    return jax.jit(lambda chosen: dispatch._slots_by_sorting(chosen, experts, block))


def test_falls_back(caplog):
    """What no kernel takes is computed all the same, with one line that says why; and has no tape."""
    backend._say_once.cache_clear()
    indices, floats, _ = mlp_case("random", hidden=12)
    for _ in range(2):
        value = MLP(floats[0], indices, *floats[1:])
    assert_close(value, mlp_reference.expert_mlp(floats[0], indices, *floats[1:]))
    assert [r.message for r in caplog.records if "no multiple of 128" in r.message] == [
        "expert MLP without a kernel: a hidden size of 12 is no multiple of 128"
    ]
    assert MLP.start_tape((TOKENS, CHOICES), floats[2].shape, jnp.float32) is None


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


def test_float32_leaves_room_for_what_the_compiler_spills():
    """On a v4, for which tests/aot compiles them; before, libtpu 0.0.42 ran out of vector memory."""
    v4, f32 = tiles.GENERATIONS["v4"], jnp.float32
    for size, hidden, block in ((640, 640, None), (944, 640, None), (568, 640, 16), (360, 1024, 16), (640, 512, 32)):
        found = Tiles.of(3072, 6, size, hidden, f32, v4)
        assert block == (found.block if found else None)
    for shape, outputs in (((6, 1024, 1280), 256), ((6, 2560, 512), 128)):
        assert LinearTiles.of(1024, shape, f32, v4).outputs == outputs
