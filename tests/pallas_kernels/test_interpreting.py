"""The harness that looks for races finds one, in whichever kernel it is."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.pallas_kernels.interpreting import on_two_cores


def copied(x, races):
    """x [16, 128] through a kernel whose two cores write to 8 rows each: their own, or both to the first ones."""

    def kernel(x_ref, out_ref, semaphore):
        start = 0 if races else 8 * pl.program_id(0)
        copy = pltpu.make_async_copy(x_ref, out_ref.at[pl.ds(start, 8)], semaphore)
        copy.start()
        copy.wait()

    return pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(x)


@pytest.mark.parametrize("races", [(False, False), (True, False), (False, True)])
def test_a_race_is_found_in_any_kernel(races):
    """In the first and in the second of two."""
    x = jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128)
    function = jax.jit(lambda x: copied(copied(x, races[0]), races[1]))
    if any(races):
        with pytest.raises(AssertionError, match="race"):
            on_two_cores(function, x)
    else:
        assert jnp.array_equal(on_two_cores(function, x), x)


def test_something_has_to_be_interpreted():
    """A function without kernels proves nothing."""
    with pytest.raises(AssertionError, match="no kernel"):
        on_two_cores(jnp.sin, jnp.ones(3))
