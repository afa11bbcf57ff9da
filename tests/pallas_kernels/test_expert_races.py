"""The experts' kernels on two cores at once, uninitialised memory NaN, under the race detector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attention_moe.reference as linear_reference
from pallas_kernels.dispatch import api as dispatch
from pallas_kernels.expert_mlp import ExpertMLP
from tests.pallas_kernels.expert_cases import (
    CHOICES,
    EXPERTS,
    LINEAR,
    MLP,
    SELECTIONS,
    TOKENS,
    assert_close,
    compiled,
    fresh,
    halves_case,
    linear_case,
    linear_halves_case,
    mlp_case,
    on_tape,
    with_an_empty_expert,
)
from tests.pallas_kernels.interpreting import on_two_cores

slow = pytest.mark.slow


@pytest.mark.parametrize("kind", ["some elsewhere", *(pytest.param(k, marks=slow) for k in SELECTIONS if k[0] != "s")])
def test_races(kind):
    """Two cores at once, memory uninitialised: the race detector finds nothing, and the results are the same."""
    case = mlp_case(kind)
    jax.tree.map(assert_close, on_two_cores(fresh(MLP), *case), compiled(with_an_empty_expert)(*case))


@slow
@pytest.mark.parametrize("experts", [1, EXPERTS])
def test_races_of_blocks_filled_to_a_half(experts):
    """What isn't computed is never read, or zero: uninitialised it would show."""
    case = halves_case(experts)
    jax.tree.map(assert_close, on_two_cores(fresh(MLP), *case), compiled(with_an_empty_expert)(*case))


def test_races_of_linear_blocks_filled_to_a_half():
    """The same of the attention MoE."""
    case = linear_halves_case()
    jax.tree.map(assert_close, on_two_cores(fresh(LINEAR), *case), compiled(linear_reference.expert_linear)(*case))


@pytest.mark.slow_but("one token")
@pytest.mark.parametrize("chosen", [[[3, 0, 5]], [[1, 2, 3], [6, 2, 0]]], ids=["one token", "one choice elsewhere"])
def test_races_of_a_step_of_decoding(chosen):
    """Fewer pairs than experts: each has a block, and one without an expert has the zeros of an idle one."""
    indices = np.array(chosen, np.int32)
    _, (x, weights, *matrices), _ = mlp_case("random")
    rows = x[: len(indices)], indices, weights[: len(indices)], *matrices
    assert_close(on_two_cores(jax.jit(lambda *rows: MLP(*rows)), *rows), ExpertMLP("xla")(*rows))


@pytest.mark.parametrize("kind", ["random", pytest.param("one hot", marks=slow)])
def test_races_of_linear_experts(kind):
    """The same of the attention MoE."""
    case = linear_case(kind)
    jax.tree.map(assert_close, on_two_cores(fresh(LINEAR), *case), compiled(linear_reference.expert_linear)(*case))


@slow
@pytest.mark.usefixtures("little_memory")
def test_races_of_tiles():
    """The same with columns in two tiles."""
    case = mlp_case("some elsewhere", hidden=512)
    jax.tree.map(assert_close, on_two_cores(fresh(MLP), *case), compiled(with_an_empty_expert)(*case))
    case = linear_case("random", inward=256)
    jax.tree.map(assert_close, on_two_cores(fresh(LINEAR), *case), compiled(linear_reference.expert_linear)(*case))


@slow
@pytest.mark.parametrize("depths", [1, 2])
def test_races_on_the_tape(depths):
    """Two depths, added one by one or kept aside and added at once."""
    cases = [mlp_case("some elsewhere", seed=seed) for seed in range(2)]
    floats = cases[0][1]

    def run(tape):
        rows = []
        for indices, _, cotangent in cases:
            *d_rows, tape = on_tape()(indices, floats, cotangent, tape)
            rows.append(d_rows)
            tape = tape.settle() if depths == 1 else tape
        return rows, tape.settle()

    rows, tape = on_two_cores(
        run, ExpertMLP("pallas", depths).start_tape((TOKENS, CHOICES), floats[2].shape, jnp.float32)
    )
    expected = [compiled(with_an_empty_expert)(indices, floats, d_out)[1] for indices, _, d_out in cases]
    jax.tree.map(assert_close, rows, [list(gradients[:2]) for gradients in expected])
    assert_close(tape.gate_up, expected[0][2] + expected[1][2])
    assert_close(tape.down, expected[0][3] + expected[1][3])


@slow
def test_races_of_the_counting_sort():
    """The same of the kernel that counts."""
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, 12, 600), jnp.int32)
    slots = on_two_cores(lambda chosen: dispatch._slots_by_counting(chosen, 11, 8)[0], chosen)
    np.testing.assert_array_equal(slots, dispatch._slots_by_sorting(chosen, 11, 8)[0])
