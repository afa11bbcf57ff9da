"""Kernels as a TPU would run them, on a CPU: uninitialised memory is NaN, two cores, races are noticed."""

import contextlib

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def two_cores():
    """Everything traced inside is interpreted so; fails at the end if two cores raced."""
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params):
        yield
        races = interpret_pallas_call.races
        assert races is not None, "no kernel was interpreted"
        assert not races.races_found
