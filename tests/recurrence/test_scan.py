"""The depth scan against an unrolled loop under plain autodiff: every feature, every remat policy, any depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.recurrence import DepthScan, Stepped, Weights
from tests.recurrence.cases import (
    SIZE,
    SLOTS,
    SlotsGradient,
    arrays,
    scanned_loss,
    step,
    step_without_memory,
    unrolled_loss,
)

REMATS = ("full", "attention", "none")
TOLERANCE = 1e-6  # of each array's largest gradient, float32


def floats_of(given):
    """What is differentiated: weights, the first state, the injected input."""
    return given["weights"], given["state"]["x"], given["inputs"]["e"]


def assert_same(actual, expected):
    """Loss and every gradient."""
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected_gradients)
    for path, wanted in jax.tree_util.tree_leaves_with_path(expected_gradients):
        got = functools.reduce(lambda tree, key: tree[getattr(key, "key", getattr(key, "idx", None))], path, gradients)
        bound = TOLERANCE * max(float(jnp.abs(wanted).max()), 1e-3)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))


@functools.cache
def program(remat, static, rows=None, gradient_depths=None, output_depths=None):
    """(floats, given, depth) -> ((loss, what the scan returned), gradients), the depth static or a run-time number."""
    how = {"remat": remat, "rows": rows, "gradient_depths": gradient_depths, "output_depths": output_depths}
    gradient = jax.value_and_grad(functools.partial(scanned_loss, **how), has_aux=True)
    return jax.jit(gradient, static_argnums=2 if static else ())


def scanned(depth, remat="full", static=True, seed=0, rows=None, **how):
    given = arrays(rows=max(rows) + 1 if rows else SLOTS, seed=seed)
    (loss, _), gradients = program(remat, static, rows, **how)(floats_of(given), given, depth)
    return loss, gradients


def unrolled(depth, seed=0, rows=None, **how):
    given = arrays(rows=max(rows) + 1 if rows else SLOTS, seed=seed)
    return jax.value_and_grad(functools.partial(unrolled_loss, depth=depth, rows=rows, **how))(floats_of(given), given)


@pytest.mark.parametrize("remat", REMATS)
def test_static_depth(remat):
    """States of floats and integers, inputs with a gradient summed over depths, outputs of every depth, memory."""
    assert_same(scanned(SLOTS, remat), unrolled(SLOTS))


@pytest.mark.parametrize("remat", REMATS)
def test_run_time_depth(remat):
    """One program for every depth."""
    for depth in (1, 3, SLOTS):
        assert_same(scanned(depth, remat, static=False), unrolled(depth))


@pytest.mark.parametrize("rows", [(0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 1, 1, 1, 2)])
def test_rows_that_serve_several_depths(rows):
    """Cycle, sequence, and all but the first and last: gradients of a row are added."""
    assert_same(scanned(SLOTS, rows=rows), unrolled(SLOTS, rows=rows))


def test_rows_start_again_beyond_the_last_one():
    """A cycle that is run deeper than there are rows of it, which was the last row over and over."""
    assert_same(scanned(SLOTS, rows=(0, 1, 2)), unrolled(SLOTS, rows=(0, 1, 2) * SLOTS))


def test_rows_at_a_run_time_depth_with_truncation():
    """Row by row what the unrolled loop adds, from the first differentiated depth on."""
    rows = (0, 1, 0, 1, 0, 1)
    for depth in (2, 5):
        actual = scanned(depth, "none", static=False, rows=rows, gradient_depths=3)
        assert_same(actual, unrolled(depth, rows=rows, first=max(0, depth - 3)))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("remat", REMATS)
def test_truncation_is_a_stop_gradient_at_that_depth(remat, static):
    """Gradients from depth L - k on; the first state gets none, weights and inputs those of the last k."""
    for depth in (SLOTS, 2):
        actual = scanned(depth, remat, static=static, gradient_depths=2)
        assert_same(actual, unrolled(depth, first=depth - 2))
    _, (_, d_x, d_e) = scanned(SLOTS, remat, static=static, gradient_depths=2)
    assert not np.any(d_x) and np.all(d_e != 0)


@pytest.mark.parametrize("static", [True, False])
def test_outputs_of_the_last_depths(static):
    """Aligned at the end, zero where there was no such depth."""
    for depth in (2, 5):
        assert_same(scanned(depth, "none", static=static, output_depths=3), unrolled(depth, last=3))


def test_what_is_returned_without_a_gradient():
    """The forward pass alone gives the same; counts are those of the depths that were, outputs stand at their depth."""
    given = arrays()
    (_, found), _ = program("none", False)(floats_of(given), given, 4)
    _, alone = jax.jit(functools.partial(scanned_loss, remat="full"))(floats_of(given), given, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, alone)
    np.testing.assert_array_equal(alone.counts["depth"], [40, 41, 42, 43, 0, 0])
    assert np.all(alone.outputs["probability"][:4] > 0) and not np.any(alone.outputs["probability"][4:])
    assert alone.state["visits"].dtype == jnp.int32
    np.testing.assert_array_equal(alone.counts["open"].sum(), alone.state["visits"].sum())


def test_the_tape_is_needed():
    """A tape that forgets what deeper depths left changes the gradient: the comparison above sees the memory."""
    given = arrays()

    def forgetful(weights, state, inputs, depth, memory, context, tape=None):
        tape = tape and jax.tree.map(jnp.zeros_like, tape)
        return step(weights, state, inputs, depth, memory, context, tape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.recurrence.cases.step", forgetful)
        (_, _), gradients = jax.value_and_grad(scanned_loss, has_aux=True)(floats_of(given), given, SLOTS)
    wanted = unrolled(SLOTS)[1]
    assert float(jnp.abs(gradients[0]["shared"]["key"] - wanted[0]["shared"]["key"]).max()) > 1e-3


def test_sums_over_depths_are_float32():
    """In bfloat16 compute, 64 small contributions to weights and inputs don't get lost beside one large one."""
    depths = 64

    def one(weights, state, inputs, depth, memory, context, tape=None):
        # d_out / d_w is 1 at the last depth, which comes first on the way back, and 2^-9 at every other.
        share = jnp.where(depth.index == depths - 1, 1.0, 2.0**-9).astype(jnp.bfloat16)
        return Stepped(state + share * (weights.shared["w"] + inputs), memory)

    def loss(w, e):
        cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(jnp.bfloat16))
        scan = DepthScan(one, depths, "full", cast)
        state = jnp.zeros((), jnp.bfloat16)
        return scan(Weights({"w": w}), state, e, (), (), depths).state.astype(jnp.float32)

    d_w, d_e = jax.grad(loss, argnums=(0, 1))(jnp.float32(0.0), jnp.bfloat16(0.0))
    assert d_w.dtype == jnp.float32
    assert float(d_w) == 1 + 63 * 2.0**-9  # in bfloat16 the sum would stay at 1
    assert float(d_e) == float(jnp.bfloat16(1 + 63 * 2.0**-9))


@pytest.mark.parametrize("remat", REMATS)
def test_memory_of_the_gradient_is_linear_in_depth(remat):
    """Temporaries of the compiled gradient at 8, 16 and 32 depths: each depth adds the same."""
    first, second = _growth(remat, None, step)
    assert STATE <= second <= 1.25 * first, (first, second)


@pytest.mark.slow
def test_memory_with_truncation_grows_with_the_differentiated_depths_only():
    """At four differentiated depths a further depth adds nothing but its number among the counts; a memory along depth
    keeps its slots all the same, which the forward pass needs."""
    assert min(_growth("none", None, step_without_memory)) >= STATE
    assert max(_growth("none", 4, step_without_memory)) <= 64
    assert max(_growth("none", 4, step)) <= 5 * STATE < 8 * STATE < min(_growth("none", None, step))


MANY = 256
STATE = MANY * SIZE * 4
"""Bytes of x, and of a slot."""


@functools.cache
def _growth(remat, gradient_depths, step):
    """Bytes of temporaries that a depth adds, from 8 to 16 and from 16 to 32."""

    def temporary(slots):
        attends = step is not step_without_memory
        tape = {"memory": SlotsGradient(jnp.zeros((slots, MANY, SIZE)))} if attends else {}
        memory = jnp.zeros((slots, MANY, SIZE)) if attends else ()

        def loss(weights, x, e):
            scan = DepthScan(step, slots, remat, lambda w: w, lambda: tape, gradient_depths, 1)
            state = {"x": x, "halted": jnp.zeros(MANY), "visits": jnp.zeros(MANY, jnp.int32)}
            rows = Weights(weights["shared"], weights["stacked"], (0,) * slots)
            context = arrays(rows=1)["context"]
            return jnp.sum(scan(rows, state, {"e": e, "number": jnp.int32(0)}, memory, context, slots).state["x"])

        shape = jax.ShapeDtypeStruct((MANY, SIZE), jnp.float32)
        weights = jax.eval_shape(lambda: arrays(rows=1)["weights"])
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(weights, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary(slots) for slots in (8, 16, 32)]
    return (sizes[1] - sizes[0]) / 8, (sizes[2] - sizes[1]) / 16
