"""The experts' kernels with matrices in eight bits, interpreted, against those with what the eight bits stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_moe import ExpertLinear
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.weights import Arranged, Stacked
from tests.pallas_kernels.compiling import KINDS, compiling_for
from tests.pallas_kernels.expert_cases import EXPERTS, assert_close, linear_case, mlp_case
from tests.pallas_kernels.interpreting import on_two_cores

MLP, LINEAR = ExpertMLP("pallas", int8=True), ExpertLinear("pallas", int8=True)


def uneven(matrices: jax.Array) -> jax.Array:
    """Each output of another size, so that a wrong scale shows."""
    sizes = np.random.default_rng(1).uniform(0.1, 10, size=(*matrices.shape[:-2], 1, matrices.shape[-1]))
    return matrices * jnp.asarray(sizes, matrices.dtype)


@pytest.mark.slow_but("random")
@pytest.mark.parametrize("kind", ["random", "one hot", "some elsewhere"])
def test_mlp(kind):
    """Of rows on two cores, without a race."""
    indices, (x, weights, gate_up, down), _ = mlp_case(kind)
    gate_up, down = jnp.swapaxes(uneven(jnp.swapaxes(gate_up, 1, 2)), 1, 2), uneven(down)
    kept = MLP.arrange(gate_up, down)
    assert [its.matrices.dtype for its in kept] == [jnp.int8] * 2
    meant = kept[0].as_array(jnp.float32), kept[1].as_array(jnp.float32)
    expected = ExpertMLP("xla")(x, indices, weights, *meant)
    assert_close(on_two_cores(jax.jit(lambda *all: MLP(x, indices, weights, *all)), *kept), expected)
    # A number is wrong by a 12th of a step's square on average, 0.7 % of a row whose largest is three times its mean
    # square's root; three matrices come together.
    exact = ExpertMLP("xla")(x, indices, weights, gate_up, down)
    assert 0.002 < np.linalg.norm(expected - exact) / np.linalg.norm(exact) < 3 * 0.007


@pytest.mark.slow_but("random")
@pytest.mark.parametrize("kind", ["random", "one hot"])
def test_linear(kind):
    """With a score and without; the shared expert is folded in before."""
    index, (x, score, routed, shared), _ = linear_case(kind)
    kept = LINEAR.arrange(uneven(routed + shared))
    assert kept.matrices.dtype == jnp.int8
    meant = kept.as_array(jnp.float32)
    own = on_two_cores(jax.jit(lambda weight: LINEAR(x, index, score, weight)), kept)
    assert_close(own, ExpertLinear("xla")(x, index, score, meant))
    assert_close(own, score[:, None] * LINEAR(x, index, None, kept))
    assert_close(LINEAR(x, jnp.int32(2), None, kept), LINEAR(x, jnp.full_like(index, 2), None, kept))


@pytest.mark.slow
def test_experts_of_one_depth_of_several():
    """Stacked ones are those of its row."""
    indices, (x, weights, *matrices), _ = mlp_case("random")
    stacks = [jnp.stack([jnp.zeros_like(its), its]) for its in matrices]
    stacked = [Stacked(its, jnp.int32(1)) for its in MLP.arrange(*stacks)]
    assert_close(MLP(x, indices, weights, *stacked), MLP(x, indices, weights, *MLP.arrange(*matrices)))


def test_where_eight_bits_are_kept():
    """On a CPU, and where a TPU has a kernel for the shapes that is faster so; elsewhere they stay as they are."""
    _, (_, _, gate_up, down), _ = mlp_case("random")
    auto = ExpertMLP("auto", int8=True)
    assert isinstance(auto.arrange(gate_up, down)[0], Arranged)
    with compiling_for(KINDS["v5e"]):
        assert isinstance(auto.arrange(gate_up, down)[1], Arranged)
        assert auto.arrange(gate_up[..., :96], down[..., :96])[0].shape == (EXPERTS, *gate_up.shape[1:2], 96)
    with compiling_for(KINDS["v4"]):
        assert auto.arrange(gate_up, down)[1] is down
