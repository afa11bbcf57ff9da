"""Kernels as a TPU would run them, on a CPU: uninitialised memory is NaN, two cores, races are noticed."""

from collections.abc import Iterator
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Jaxpr, jaxprs_in_params


def on_two_cores(function, *arguments):
    """function(*arguments), every kernel in it interpreted so; fails if in any of them two cores raced.

    What `function` jits must be traced anew: pass one that wasn't called outside.
    """
    states = []

    def recorded(*args, make=interpreter.RaceDetectionState, **named):  # the interpreter makes one a kernel
        states.append(make(*args, **named))
        return states[-1]

    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    with mock.patch.object(interpreter, "RaceDetectionState", recorded), pltpu.force_tpu_interpret_mode(params):
        try:
            results = jax.block_until_ready(function(*arguments))
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError as error:  # newer versions of jax don't go on behind the first race
            raise AssertionError("a race: see the output") if "RACE DETECTED" in str(error) else error from error
    assert states, "no kernel was interpreted"
    assert not any(state.races_found for state in states), "a race: see the output"
    return results


def operations_outside_kernels(jaxpr: Jaxpr) -> Iterator[tuple[str, str]]:
    """(name, type of the first result) of every operation that is XLA's, in inner jaxprs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            continue
        yield equation.primitive.name, equation.outvars[0].aval.str_short(short_dtypes=True)
        for inner in jaxprs_in_params(equation.params):
            yield from operations_outside_kernels(inner)
