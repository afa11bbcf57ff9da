"""The attention MoE's kernels on the tape of the depth scan, interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.reference as linear_reference
from dreamer_jax.blocks.projections import ProjectionTapes
from dreamer_jax.recurrence.tape import make_room, settle
from pallas_kernels.attention_moe import ExpertLinear, LinearTape
from tests.pallas_kernels.expert_cases import LINEAR, assert_close, compiled, linear_case


@pytest.mark.slow_but("1")
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
    for kind in ("random", "one hot", "random"):
        index, floats, cotangent = linear_case(kind)
        if tape is None:
            tape = linear.start_tape(index.size, floats[2].shape, jnp.float32)
        d_x, d_score, tape = one_depth(index, floats, cotangent, jax.jit(lambda tape: tape.make_room())(tape))
        expected = compiled(linear_reference.expert_linear)(index, floats, cotangent)[1]
        jax.tree.map(assert_close, (d_x, d_score), expected[:2])
        routed, shared = routed + expected[2], shared + expected[3]
    tape = jax.jit(lambda tape: tape.settle())(tape)
    assert isinstance(tape, LinearTape) and tape.every == depths
    assert_close(tape.totals, routed)
    assert_close(np.sum(tape.totals, axis=0), shared)


def test_no_tape_without_a_kernel():
    assert LINEAR.start_tape(64, (4, 100, 128), jnp.float32) is None


def tape_of(linear):
    """Of four experts."""
    tape = linear.start_tape(64, (4, 128, 128), jnp.float32)
    assert tape is not None
    return tape


def test_more_depths_than_are_of_use_are_not_kept():
    """4 experts of 1024 rows a depth add at every depth; of half as many, every other one."""
    for tokens, every in ((4096, 1), (2048, 2), (64, 8)):
        tape = ExpertLinear("pallas", 8).start_tape(tokens, (4, 128, 128), jnp.float32)
        assert tape is not None and tape.every == every


@pytest.mark.slow
def test_tapes_of_a_module():
    """Room is made in each that has none left, and each is settled."""
    one, two = (tape_of(ExpertLinear("pallas", n)) for n in (1, 2))
    assert two.rows is not None
    full = dataclasses.replace(two, rows=two.rows._replace(depth=jnp.float32(2)))
    with_room = ProjectionTapes(full, one, False).make_room()
    assert isinstance(with_room, ProjectionTapes) and with_room.qkv.rows.depth == 0
    partly = dataclasses.replace(two, rows=two.rows._replace(depth=jnp.float32(1)))
    tree = {"a": {"projections": ProjectionTapes(partly, one, False)}, "b": partly}
    assert make_room(tree)["a"]["projections"].qkv.rows.depth == make_room(tree)["b"].rows.depth == 1
    assert settle(tree)["a"]["projections"].qkv.rows.depth == settle(tree)["b"].rows.depth == 0
