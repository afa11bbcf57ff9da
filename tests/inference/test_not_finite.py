"""What isn't finite in one row's memory is its own: rows that have the slots later, or pages beside, don't meet it."""

import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.memory import Slots
from dreamer_jax.blocks.positions import Depth
from pallas_kernels.sequence_attention import slots


@pytest.mark.parametrize("table", [None, [[0, 9, 9, 9], [3, 1, 2, 9]]])
def test_not_finite_values_stay_with_those_who_see_them(table):
    q, k, v = (jnp.asarray(np.random.default_rng(n).normal(size=(2, 1, 2, 8)), jnp.float32) for n in range(3))
    rows, size = (2, 16) if table is None else (4, 4)
    empty = Slots.empty(1, rows, size, 2, 8, "float32").paged(None if table is None else jnp.asarray(table))
    at = jnp.asarray([[0], [1]], jnp.int32)
    depth = Depth(jnp.int32(0), jnp.int32(1))
    clean = empty.written(k, v, depth, at)
    bad = empty.written(k, v.at[1].set(jnp.inf), depth, at)
    # and what an earlier request has left behind the first row's position
    bad = bad.written(k.at[1].set(jnp.nan), v.at[0].set(jnp.nan), depth, jnp.asarray([[2], [99]]))

    def seen(memory):
        return slots.sequence_attention(q, memory.keys, memory.values, jnp.int32(0), at, memory.table)

    np.testing.assert_array_equal(seen(bad)[0], seen(clean)[0])
    assert jnp.isnan(seen(bad)[1]).all()
