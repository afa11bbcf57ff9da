"""Attention over pages as jax's kernel wants it: which pages, lengths and heads it is given.

The kernel itself can't be interpreted on a CPU (jax 0.10); its reference stands in for it here, and tests/aot compiles
the kernel for TPUs.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from pallas_kernels.sequence_attention import SequenceAttention, paged, slots
from tests.pallas_kernels.compiling import KINDS, compiling_for

DEPTHS, PAGES, SIZE, KV, HEAD, HEADS = 3, 7, 16, 2, 128, 4
TABLE = np.array([[3, 1, 6], [0, 5, PAGES]], np.int32)
"""The second row has two pages."""
RNG = np.random.default_rng(0)
KEYS, VALUES = RNG.normal(size=(2, DEPTHS, PAGES, SIZE, KV, HEAD)).astype(np.float32)


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """In the kernel's place; it takes no sizes of blocks."""

    def run(*arguments, sm_scale, num_kv_pages_per_block, num_queries_per_block):
        assert num_kv_pages_per_block <= arguments[3].shape[1]
        return ref_ragged_paged_attention(*arguments, sm_scale=sm_scale)

    monkeypatch.setattr(paged, "ragged_paged_attention", run)


@pytest.mark.parametrize(
    ("depths", "positions"),
    [
        ([[0, 2, 1], [1, 1, 2]], [[0, 5, 40], [7, 31, 1 << 30]]),
        ([[2], [0]], [[47], [17]]),
        (1, [[45, 46, 47], [10, 11, 12]]),
        (2, [[46, 47, 48], [30, 31, 32]]),  # a chunk that reaches behind the row's pages
        (0, [[20, 21, 22], [1 << 30, (1 << 30) + 1, (1 << 30) + 2]]),
    ],
)
def test_pages_and_lengths(depths, positions):
    """As the form that gathers the pages: what a position inside of the pages sees is the same."""
    depths, positions = jnp.asarray(depths, jnp.int32), np.array(positions, np.int32)
    q = jnp.asarray(RNG.normal(size=(*positions.shape, HEADS, HEAD)), jnp.float32)
    places, table = jnp.asarray(positions), jnp.asarray(TABLE)
    found = paged.attention(q, paged.interleaved(jnp.asarray(KEYS), jnp.asarray(VALUES)), depths, places, table)
    wanted = slots.sequence_attention(q, jnp.asarray(KEYS), jnp.asarray(VALUES), depths, places, table)
    inside = positions < (TABLE < PAGES).sum(1)[:, None] * SIZE
    assert inside.any()
    np.testing.assert_allclose(np.asarray(found)[inside], np.asarray(wanted)[inside], atol=2e-5)


def test_there_and_back():
    keys, values = paged.apart(paged.interleaved(jnp.asarray(KEYS), jnp.asarray(VALUES)))
    np.testing.assert_array_equal(keys, KEYS)
    np.testing.assert_array_equal(values, VALUES)


def test_who_is_interleaved():
    """On a TPU, where heads fill tiles; nowhere else."""
    attention = SequenceAttention()
    takes = functools.partial(attention.interleaves, dtype="bfloat16")
    assert not takes(8, 128)
    for kind in KINDS.values():
        with compiling_for(kind):
            assert takes(8, 128) and takes(1, 128) and attention.interleaves(2, 256, "float32")
            assert not takes(8, 64) and not takes(3, 128) and not takes(5, 128)
