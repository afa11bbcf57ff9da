"""What `dreamer bench kernels` predicts: every case traces for a TPU that isn't there, with the kernels it names."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from dreamer_jax.benchmarks.kernels import kernel_cases
from pallas_kernels import tiles
from tests.pallas_kernels.compiling import KINDS, compiling_for

CASES = kernel_cases()


def kernels(jaxpr):
    """Names of the kernels in it, in inner jaxprs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            assert not equation.params["interpret"]
            yield str(equation.params["name"])
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from kernels(inner)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.shape}")
def test_cases_trace_for_a_tpu(case):
    """Arguments, kernel and XLA's form; what is carried from step to step has the type it came in."""
    with compiling_for(KINDS["v5p"]):
        its = jax.eval_shape(lambda: case.arguments(jax.random.key(0)))
        arguments = *its, jax.ShapeDtypeStruct((), jnp.int32)
        program, results = jax.make_jaxpr(lambda *its: case.kernel(*its), return_shape=True)(*arguments)
        if case.xla is not None:
            jax.eval_shape(lambda *its: case.xla(*its), *arguments)
    found = set(kernels(program.jaxpr))
    assert found
    if case.carried is not None:
        carried = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arguments[case.carried])
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), results[-1]) == carried
    read = []
    with pytest.raises(StopAsking):
        case.launches(lambda name: asked(name, read), tiles.GENERATIONS["v5p"])
    assert all(any(name.partition("[")[0] in each for each in found) for name in read), (read, found)


class StopAsking(Exception):
    """Nothing was compiled, so there is no schedule to read."""


def asked(name, read):
    read.append(name)
    raise StopAsking


def test_every_operation_has_cases_of_both_directions():
    """Forward and gradient; the counting sort and decoding have no gradient."""
    names = {case.name for case in CASES}
    assert names == {
        *(f"{name} {way}" for name in ("depth_attention", "depth_window") for way in ("forward", "backward")),
        *(
            f"{name} {way}"
            for name in ("sequence_attention", "expert_mlp", "expert_linear")
            for way in ("forward", "gradient")
        ),
        *("dispatch slots", "expert_mlp decode", "expert_mlp decode int8", "expert_linear decode int8"),
    }
