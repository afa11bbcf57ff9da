"""The attention MoE's kernels on the tape of the depth scan, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels.attention_moe.reference as linear_reference
from pallas_kernels.attention_moe import LinearTape
from tests.pallas_kernels.expert_cases import LINEAR, assert_close, compiled, linear_case


def test_totals_of_two_depths():
    """The tape's totals are the sum of the routed gradients; their sum over experts is that of the shared expert."""

    @jax.jit
    def one_depth(index, floats, cotangent, tape):
        x, score, routed, shared = floats

        def operation(x, score, tape):
            return LINEAR(x, index, score, routed, shared, tape)

        return jax.vjp(operation, x, score, tape)[1](cotangent)

    tape, routed, shared = None, 0, 0
    for kind in ("random", "one hot"):
        index, floats, cotangent = linear_case(kind)
        if tape is None:
            tape = LINEAR.start_tape(index.size, floats[2].shape, jnp.float32)
        d_x, d_score, tape = one_depth(index, floats, cotangent, tape)
        expected = compiled(linear_reference.expert_linear)(index, floats, cotangent)[1]
        jax.tree.map(assert_close, (d_x, d_score), expected[:2])
        routed, shared = routed + expected[2], shared + expected[3]
    assert isinstance(tape, LinearTape) and tape.every == 1
    assert_close(tape.totals, routed)
    assert_close(np.sum(tape.totals, axis=0), shared)


def test_no_tape_without_a_kernel():
    assert LINEAR.start_tape(64, (4, 100, 128), jnp.float32) is None
