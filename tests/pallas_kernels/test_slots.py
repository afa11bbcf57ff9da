"""Attention of positions in flight over long caches, against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sequence_attention.slots import SHORT, SLOTS_AT_ONCE, sequence_attention

LENGTH = SHORT + SLOTS_AT_ONCE
"""Slots that are read block by block."""
DEPTHS, ROWS, HEADS, KV, SIZE = 3, 2, 4, 2, 8


def plainly(q, keys, values, depths, positions):
    """Eq. 1 for one query after another."""
    out = np.zeros(q.shape)
    for row, place, head in np.ndindex(q.shape[:3]):
        seen = depths[row, place], row, slice(0, positions[row, place] + 1), head // (HEADS // KV)
        logits = keys[seen] @ q[row, place, head] / np.sqrt(SIZE)
        weights = np.exp(logits - logits.max())
        out[row, place, head] = weights @ values[seen] / weights.sum()
    return out


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("together", [True, False])
def test_blocks_of_long_caches(queries, together):
    """At one depth or each at its own; a position outside of all slots leaves the others as they are."""
    rng = np.random.default_rng(queries)
    q = rng.normal(size=(ROWS, queries, HEADS, SIZE))
    keys, values = rng.normal(size=(2, DEPTHS, ROWS, LENGTH, KV, SIZE))
    positions = rng.integers(0, LENGTH, (ROWS, queries))
    positions[0, 0] = LENGTH - 1
    depths = np.full((ROWS, queries), 1) if together else rng.integers(0, DEPTHS, (ROWS, queries))
    given = jnp.int32(1) if together else jnp.asarray(depths, jnp.int32)
    run = jax.jit(sequence_attention)
    for places in (positions, np.minimum(positions, 5)):
        found = run(*(jnp.asarray(each, jnp.float32) for each in (q, keys, values)), given, jnp.asarray(places))
        np.testing.assert_allclose(found, plainly(q, keys, values, depths, places), atol=2e-5)
    outside = positions.copy()
    outside[1, 0] = 1 << 30
    found = run(*(jnp.asarray(each, jnp.float32) for each in (q, keys, values)), given, jnp.asarray(outside))
    np.testing.assert_allclose(found[0], plainly(q, keys, values, depths, positions)[0], atol=2e-5)
