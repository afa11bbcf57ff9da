"""The attention MoE's kernels on the tape of the depth scan, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.reference as linear_reference
from dreamer_jax.blocks.projections import ProjectionTapes
from dreamer_jax.recurrence.tape import depths_between
from pallas_kernels.attention_moe import ExpertLinear, LinearTape
from tests.pallas_kernels.expert_cases import LINEAR, assert_close, compiled, linear_case


@pytest.mark.parametrize("depths", [1, 2])
def test_totals_of_three_depths(depths):
    """The tape's totals are the sum of the routed gradients, added at every depth or two at a time, the last time one;
    their sum over experts is that of the shared expert."""
    linear = ExpertLinear("pallas", depths)

    @jax.jit
    def one_depth(index, floats, cotangent, tape):
        x, score, routed, shared = floats

        def operation(x, score, tape):
            return linear(x, index, score, routed, shared, tape)

        return jax.vjp(operation, x, score, tape)[1](cotangent)

    tape, routed, shared = None, 0, 0
    for depth, kind in enumerate(("random", "one hot", "random")):
        index, floats, cotangent = linear_case(kind)
        if tape is None:
            tape = linear.start_tape(index.size, floats[2].shape, jnp.float32)
        d_x, d_score, tape = one_depth(index, floats, cotangent, tape)
        expected = compiled(linear_reference.expert_linear)(index, floats, cotangent)[1]
        jax.tree.map(assert_close, (d_x, d_score), expected[:2])
        routed, shared = routed + expected[2], shared + expected[3]
        if depth % depths == depths - 1 or depth == 2:
            tape = jax.jit(lambda tape: tape.settle())(tape)
    assert isinstance(tape, LinearTape) and tape.every == depths
    assert_close(tape.totals, routed)
    assert_close(np.sum(tape.totals, axis=0), shared)


def test_no_tape_without_a_kernel():
    assert LINEAR.start_tape(64, (4, 100, 128), jnp.float32) is None


def test_tapes_settle_as_often_as_the_shortest_needs():
    """Of a module's tapes, and of a whole tree: those that keep nothing aside don't count."""
    one, two, four = (ExpertLinear("pallas", n).start_tape(64, (4, 128, 128), jnp.float32) for n in (1, 2, 4))
    assert ProjectionTapes(one, one, False).every == 1 and ProjectionTapes(four, one, False).every == 4
    assert ProjectionTapes(four, two, False).every == 2
    assert depths_between({"a": {"projections": ProjectionTapes(four, four, False)}, "b": two, "c": one}) == 2
    settled = ProjectionTapes(one, two, False).settle()
    assert isinstance(settled, ProjectionTapes) and settled.out.rows.depth == 0
