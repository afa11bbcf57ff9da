"""Attention that sees both ways, or along a mask, against one query after the other in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sequence_attention.bidirectional import bidirectional_attention


def plain(q, k, v, seen):
    out = np.zeros(q.shape)
    for b, i, n in np.ndindex(q.shape[:3]):
        columns, group = np.flatnonzero(seen[b, i]), n // (q.shape[2] // k.shape[2])
        if len(columns):
            scores = k[b, columns, group] @ q[b, i, n] / q.shape[3] ** 0.5
            weights = np.exp(scores - scores.max())
            out[b, i, n] = weights @ v[b, columns, group] / weights.sum()
    return out


@pytest.mark.parametrize("masked", [False, True])
def test_every_query_is_a_softmax_over_what_it_sees(masked):
    """Two documents and padding in a row, grouped heads; position 2 sees nothing, and no gradient comes from there."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 9, heads, 4)).astype(np.float32) for heads in (6, 2, 2))
    segments = np.array([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9], np.int32)
    visible = rng.random((2, 9, 9)) < 0.4
    visible[:, 2] = False
    seen = (segments[:, :, None] == segments[:, None]) & (visible if masked else True)

    def run(q, k, v):
        out = bidirectional_attention(q, k, v, jnp.asarray(segments), jnp.asarray(visible) if masked else None)
        return jnp.sum(jnp.sin(out)), out

    program: Any = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))
    (_, out), gradients = program(q, k, v)
    wanted = plain(*(np.asarray(x, np.float64) for x in (q, k, v)), seen)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    if masked:
        assert not np.any(out[:, 2]) and not np.any(gradients[0][:, 2])
    unseen = ~seen.any(1)  # [B, S]: columns that no row sees
    assert not np.any(gradients[2][unseen])
    # A central difference of one value, which only those that see it pass on.
    step = np.zeros_like(v)
    step[0, 1, 1, 2] = 1e-2
    slope = (run(q, k, v + step)[0] - run(q, k, v - step)[0]) / 2e-2
    np.testing.assert_allclose(gradients[2][0, 1, 1, 2], slope, atol=2e-3)
