"""Who goes on to another repeat: the largest gates of each document, and capacities that compound."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.mixture_of_repeats import drawn_capacities, largest, share_going_on


@pytest.mark.parametrize("share", [0.3, 0.75, 1.0])
def test_the_largest_of_each_document(share):
    rng = np.random.default_rng(5)
    logits, active = rng.normal(size=(3, 20)), rng.random((3, 20)) < 0.7
    logits[:, 4:9] = logits[:, 3:4]
    segments = np.repeat([[1] * 7 + [2] * 10 + [0] * 3], 3, 0)
    found = np.asarray(largest(jnp.asarray(logits), active, segments, share))
    for row in range(3):
        for document in (1, 2):
            own = np.flatnonzero((segments[row] == document) & active[row])
            best = own[np.argsort(-logits[row, own], kind="stable")][: int(share * len(own) + 1e-9)]
            np.testing.assert_array_equal(np.flatnonzero(found[row] & (segments[row] == document)), np.sort(best))


def test_capacities():
    """They compound: int(f_r / f_{r-1} n) of those that are left. Drawn ones are sorted and at most 1, which one in 21
    is exactly."""
    f = jnp.array([0.75, 0.5, 0.0, 0.0])
    np.testing.assert_allclose([share_going_on(f, r) for r in range(5)], [0.75, 2 / 3, 0, 0, 0], rtol=1e-6)
    draws = np.stack([drawn_capacities(jax.random.key(seed), 400) for seed in range(3)])
    assert np.all(np.diff(draws) <= 0) and draws.max() == 1 and draws.min() >= 0
    assert (draws == 1).mean() == pytest.approx(0.05 / 1.05, abs=0.03)
    assert draws.mean() == pytest.approx(0.05 / 1.05 + (1 / 1.05) / 2, abs=0.03)
    assert not np.array_equal(draws[0], draws[1])
