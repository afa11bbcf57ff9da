"""Attention over pages as jax's kernel wants it: which pages, lengths and heads it is given.

The kernel itself can't be interpreted on a CPU (jax 0.10); its reference stands in for it here, and tests/aot compiles
the kernel for TPUs.
"""

from __future__ import annotations

import functools

import jax
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


@pytest.mark.slow_but("depths0", "2-positions3", "0-positions4")
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


def test_more_pages_than_scalar_memory_has_room_for(monkeypatch):
    """Sequences then go one group after the other, each of which has its own pages."""
    assert paged.at_once(64 * 4, 2048) == 64  # four lanes of 64 rows of 32,768 positions: 2 MiB of numbers
    assert paged.at_once(64, 256) == 64 and paged.at_once(7, 16384) == 7 and paged.at_once(35, 16384) == 7
    depths, positions = ([[0, 2, 1], [1, 1, 2]], [[0, 5, 40], [7, 31, 16]])
    given = [jnp.asarray(its, jnp.int32) for its in (depths, positions, TABLE)]
    q = jnp.asarray(RNG.normal(size=(2, 3, HEADS, HEAD)), jnp.float32)
    both = paged.interleaved(jnp.asarray(KEYS), jnp.asarray(VALUES))
    wanted = paged.attention(q, both, *given)

    def one_by_one(function, parts):  # the reference wants lengths that are known
        calls.append(len(parts[0]))
        return jnp.stack([function(jax.tree.map(lambda its, i=i: its[i], parts)) for i in range(len(parts[0]))])

    calls: list[int] = []
    monkeypatch.setattr(jax.lax, "map", one_by_one)
    monkeypatch.setattr(paged, "NUMBERS", 256)
    np.testing.assert_allclose(paged.attention(q, both, *given), wanted, atol=1e-6)
    assert calls == [3]


def test_many_single_heads_of_float32():
    """The kernel gets each twice; what comes out is as many as there are."""
    keys, values = RNG.normal(size=(2, DEPTHS, PAGES, SIZE, 8, HEAD)).astype(np.float32)
    q = jnp.asarray(RNG.normal(size=(2, 1, 8, HEAD)), jnp.float32)
    places, table = jnp.array([[40], [17]], jnp.int32), jnp.asarray(TABLE)
    found = paged.attention(q, paged.interleaved(jnp.asarray(keys), jnp.asarray(values)), jnp.int32(1), places, table)
    wanted = slots.sequence_attention(q, jnp.asarray(keys), jnp.asarray(values), jnp.int32(1), places, table)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_there_and_back():
    keys, values = paged.apart(paged.interleaved(jnp.asarray(KEYS), jnp.asarray(VALUES)))
    np.testing.assert_array_equal(keys, KEYS)
    np.testing.assert_array_equal(values, VALUES)


def test_who_is_interleaved():
    """On a TPU, where heads fill tiles; nowhere else."""
    attention = SequenceAttention()
    takes = functools.partial(attention.interleaves, dtype="bfloat16")
    assert not takes(8, 128) and not attention.flattens()
    for kind in KINDS.values():
        with compiling_for(kind):
            assert takes(8, 128) and takes(1, 128) and attention.interleaves(2, 128, "float32")
            assert takes(1, 256) and not takes(2, 256) and not attention.interleaves(1, 256, "float32")
            assert attention.flattens() and not takes(8, 64) and not takes(3, 128) and not takes(5, 128)
