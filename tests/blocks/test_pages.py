"""Memories in pages against the same memories in rows: what is written, what is read, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.memory import NOWHERE, Context, Slots, for_kernels, for_rows, in_pages
from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.repeats import LayerRepeats, Repeats
from dreamer_jax.blocks.shared_slots import SharedSlots
from pallas_kernels import pages
from pallas_kernels.sequence_attention import slots as over_slots
from tests.pallas_kernels.compiling import KINDS, compiling_for

ROWS, PAGE, PER_ROW, POSITIONS = 2, 4, 3, 3
SLOTS, PAGES = PAGE * PER_ROW, 11
HEADS, KV_HEADS, SIZE, DEPTHS = 4, 2, 8, 4

MEMORIES = {
    "slots": lambda rows, length: Slots.empty(DEPTHS, rows, length, KV_HEADS, SIZE, "float32"),
    "latest": lambda rows, length: shared(2, rows, length, "latest"),
    "one-recurrence": lambda rows, length: shared(1, rows, length, "latest"),
    "full": lambda rows, length: shared(2, rows, length, "full"),
    "always-last": lambda rows, length: shared(2, rows, length, "always-last"),
    "repeats": lambda rows, length: Repeats.empty(1, DEPTHS, rows, length, KV_HEADS, SIZE, "float32", whole=False),
}


def shared(kept: int, rows: int, length: int, rule: Any) -> SharedSlots:
    return SharedSlots.empty(2, kept, rows, length, KV_HEADS, SIZE, "float32", rule)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def attended(name: str, memory: Any, q, k, v, index, positions):
    """A step of these positions: what they see, and the memory."""
    depth, context = Depth(index, jnp.int32(DEPTHS)), Context(jnp.ones_like(positions), positions)
    if name != "repeats":
        return memory.attend(q, k, v, depth, context, operations_of("xla"))
    memory = memory.reaching(depth, positions % 5 != 3, context)
    out, layer = LayerRepeats(memory, 0).attend(q, k, v, depth, context, operations_of("xla"))
    return out, layer.repeats


def rows_in_pages(table: jax.Array | None, memory: Any) -> list[np.ndarray]:
    """The arrays of a memory in another form as those of one in rows."""
    leaves = [pages.rows_of(table, leaf) for leaf in jax.tree.leaves(in_pages(memory, None))]
    flat = [leaf.ndim == 4 and leaf.dtype == jnp.float32 for leaf in leaves]
    apart = [pages.heads_of(leaf, KV_HEADS, SIZE) if its else leaf for leaf, its in zip(leaves, flat, strict=True)]
    return [np.asarray(leaf) for leaf in apart]


@pytest.mark.slow_but("-pages", "slots-flat", "full")
@pytest.mark.parametrize("own_depths", [False, True])
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in MEMORIES for form in ("pages", "flat pages", "flat rows")][:-2],  # repeats in pages only
)
def test_a_memory_in_pages_is_the_memory_in_rows(name, form, own_depths):
    """Steps at one depth or at depths of their own, with positions that are nowhere, then positions that stop early.
    Flat ones, with the heads of a position side by side, are a TPU's: pages that no kernel reads, and all rows."""
    rng = np.random.default_rng(len(name))
    table = jnp.asarray(rng.permutation(PAGES)[: ROWS * PER_ROW].reshape(ROWS, PER_ROW), jnp.int32)
    table = None if form == "flat rows" else table
    plain = MEMORIES[name](ROWS, SLOTS)
    paged = plain if table is None else MEMORIES[name](PAGES, PAGE)
    paged = in_pages(paged if form == "pages" else paged.flat(), table)
    assert form == "pages" or paged.keys.shape[3:] == (128,)
    for step in range(6):
        q = normal(step, ROWS, POSITIONS, HEADS, SIZE)
        k, v = (normal(10 * step + n, ROWS, POSITIONS, KV_HEADS, SIZE) for n in (1, 2))
        positions = np.stack([rng.permutation(SLOTS)[:POSITIONS] for _ in range(ROWS)])
        if step % 2:
            positions[rng.integers(ROWS), rng.integers(POSITIONS)] = NOWHERE
        index = jnp.asarray(rng.integers(0, DEPTHS, (ROWS, POSITIONS) if own_depths else ()), jnp.int32)
        places = jnp.asarray(positions, jnp.int32)
        seen, plain = attended(name, plain, q, k, v, index, places)
        seen_in_pages, paged = attended(name, paged, q, k, v, index, places)
        inside = positions < SLOTS
        np.testing.assert_array_equal(np.asarray(seen)[inside], np.asarray(seen_in_pages)[inside])
    if hasattr(plain, "fill_deeper"):
        stopped = jnp.array([0, 1]), jnp.array([SLOTS - 1, NOWHERE])
        plain, paged = plain.fill_deeper(*stopped), paged.fill_deeper(*stopped)
    for leaf, other in zip(jax.tree.leaves(plain), rows_in_pages(table, paged), strict=True):
        np.testing.assert_array_equal(leaf, other)
        assert np.any(other)


def test_pages_that_are_not_there_take_nothing():
    """A row whose table names no page writes nowhere; the other row's pages keep what they had."""
    table = jnp.array([[2, PAGES], [PAGES, PAGES]], jnp.int32)
    memory = in_pages(MEMORIES["slots"](PAGES, PAGE), table)
    positions = jnp.array([[1, PAGE + 1], [1, 2 * PAGE]], jnp.int32)
    k = jnp.ones((ROWS, 2, KV_HEADS, SIZE))
    kept = np.asarray(memory.written(k, k, Depth(jnp.int32(0), jnp.int32(DEPTHS)), positions).keys)
    assert np.all(kept[0, 2, 1] == 1) and kept.sum() == KV_HEADS * SIZE
    filled = memory.fill_deeper(jnp.array([0, 0]), jnp.array([PAGE, 1]))
    assert not np.any(filled.keys)


@pytest.mark.parametrize(("chip", "precision"), [(None, None), ("v5e", None), ("v4", "highest")])
def test_rows_of_a_tpu(chip, precision):
    """Heads side by side; keys as its products round them, unless jax is asked for more. Pages that no kernel reads are
    alike. Other memories stay."""
    memory = MEMORIES["full"](ROWS, SLOTS)
    with compiling_for(KINDS[chip] if chip else None), jax.default_matmul_precision(precision):
        found = for_rows((memory, MEMORIES["repeats"](ROWS, SLOTS)), operations_of("auto"))
        paged = for_kernels(memory, operations_of("auto"))
    assert jax.tree.map(jnp.shape, paged) == jax.tree.map(jnp.shape, found[0])
    assert paged.keys.dtype == found[0].keys.dtype
    keys, kind = found[0].keys, jnp.bfloat16 if chip and precision is None else jnp.float32
    assert keys.dtype == found[0].values.dtype == kind
    assert keys.shape == (*memory.keys.shape[:3], *((128,) if chip else memory.keys.shape[3:]))
    assert found[0].reached.dtype == jnp.int32
    assert found[1].keys[0].shape == (DEPTHS, ROWS, SLOTS, KV_HEADS, SIZE) and found[1].keys[0].dtype == jnp.float32


@pytest.mark.parametrize("own_depths", [False, True])
def test_long_caches_are_read_in_blocks_in_pages_too(own_depths):
    """Blocks up to the last position that is somewhere: bit for bit, also in rows with the heads side by side, and
    against one softmax over all of them."""
    length, size = 3 * over_slots.SLOTS_AT_ONCE, over_slots.SLOTS_AT_ONCE // 2
    count = ROWS * length // size
    table = jnp.asarray(np.random.default_rng(0).permutation(count).reshape(ROWS, -1), jnp.int32)
    keys, values = (normal(n, DEPTHS, count, size, KV_HEADS, SIZE) for n in (1, 2))
    rows = [pages.rows_of(table, each) for each in (keys, values)]
    q, positions = 3 * normal(3, ROWS, 2, HEADS, SIZE), jnp.array([[140, 3], [NOWHERE, 200]], jnp.int32)
    depths = jnp.array([[0, 3], [1, 2]], jnp.int32) if own_depths else jnp.int32(1)
    attention = jax.jit(over_slots.sequence_attention, static_argnames="kv_heads")
    found = np.asarray(attention(q, keys, values, depths, positions, table))
    there = np.asarray(positions) < length
    np.testing.assert_array_equal(found[there], np.asarray(attention(q, *rows, depths, positions))[there])
    flat = [pages.flat(each) for each in rows]
    assert flat[0].shape == (DEPTHS, ROWS, length, 128)
    by_position = np.asarray(attention(q, *flat, depths, positions, kv_heads=KV_HEADS))
    np.testing.assert_array_equal(found[there], by_position[there])
    for b, p in np.argwhere(there):
        own = np.asarray(depths)[b, p] if own_depths else 1
        k, v = (np.repeat(np.asarray(each[own, b]), HEADS // KV_HEADS, axis=1) for each in rows)
        scores = np.einsum("nd,snd->ns", np.asarray(q[b, p], np.float64), k)[:, : positions[b, p] + 1] * SIZE**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("ns,snd->nd", weights / weights.sum(-1, keepdims=True), v[: positions[b, p] + 1])
        np.testing.assert_allclose(found[b, p], wanted, rtol=0, atol=1e-5)
