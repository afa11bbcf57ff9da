"""The dispatch plan: for any selection, every pair has its own slot in a block of its expert."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.dispatch import api, block_size_for, blocks_of, plan_dispatch, rows_of

# Few shapes, so that few programs are compiled: (tokens, choices, experts, block size); sizes off the block.
SHAPES = [(1, 1, 1, 8), (13, 2, 7, 8), (64, 1, 5, 16), (37, 4, 11, 8), (2, 3, 40, 16)]


@functools.cache
def planner(experts, block_size):
    """The plan as one compiled function of the indices."""
    return jax.jit(lambda indices: plan_dispatch(indices, experts, block_size))


@st.composite
def selections(draw):
    """(shape, [T, k] indices): uneven on purpose, often with one hot expert and several empty ones."""
    shape = tokens, choices, experts, _ = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heat = rng.normal(size=experts) * draw(st.sampled_from([0.0, 1.0, 5.0, 50.0]))
    scores = rng.gumbel(size=(tokens, experts)) + heat
    return shape, np.argsort(-scores, axis=1)[:, :choices].astype(np.int32)


def everyone_chooses(expert):
    """Token t's only choice is one expert: every other expert is empty."""
    return (64, 1, 5, 16), np.full((64, 1), expert, np.int32)


@given(selections())
@example(everyone_chooses(0))
@example(everyone_chooses(4))
@example(((64, 1, 5, 16), np.arange(64, dtype=np.int32)[:, None] % 2 * 4))  # first and last only
def test_plan(selection):
    """Own slots, blocks of one expert, nothing dropped, nothing invented, enough blocks."""
    (tokens, choices, experts, block_size), indices = selection
    plan = jax.tree.map(np.asarray, planner(experts, block_size)(indices))
    pairs = tokens * choices
    slot, source = plan.slot.reshape(-1), plan.source.reshape(-1)
    assert plan.source.shape[1] == block_size

    assert len(set(slot.tolist())) == pairs and slot.min() >= 0  # a slot of its own
    np.testing.assert_array_equal(source[slot], np.arange(pairs))  # which knows its pair
    assert np.sum(source == pairs) == source.size - pairs  # and all other slots are padding
    np.testing.assert_array_equal(plan.block_expert[slot // block_size], indices.reshape(-1))  # of its expert

    counts = np.bincount(indices.reshape(-1), minlength=experts)
    np.testing.assert_array_equal(plan.num_blocks, -(-counts // block_size))  # whole blocks, none for empty experts
    np.testing.assert_array_equal(plan.first_block, np.cumsum(plan.num_blocks) - plan.num_blocks)
    used = int(plan.used_blocks)
    assert used == plan.num_blocks.sum() <= len(plan.block_expert)
    assert np.all(np.any(plan.source[:used] < pairs, axis=1)) and np.all(plan.source[used:] == pairs)
    assert np.all(np.diff(plan.block_expert) >= 0) and 0 <= plan.block_expert.min() <= plan.block_expert.max() < experts


@given(selections())
def test_rows_come_back(selection):
    """blocks_of then rows_of is the identity, k times over."""
    (tokens, choices, experts, block_size), indices = selection
    plan = planner(experts, block_size)(indices)
    x = np.arange(tokens * 3, dtype=np.float32).reshape(tokens, 3)
    back = rows_of(blocks_of(jnp.asarray(x), plan), plan)
    np.testing.assert_array_equal(back, np.broadcast_to(x[:, None], (tokens, choices, 3)))


def test_the_worst_distribution_still_fits():
    """As many experts as there can be with one pair more than whole blocks."""
    tokens, experts, block_size = 8 * 3 + 4, 4, 8
    counts = [17, 9, 1, 1]  # each one pair into a new block
    indices = np.repeat(np.arange(experts), counts)[:, None].astype(np.int32)
    assert len(indices) == tokens
    plan = planner(experts, block_size)(indices)
    assert int(plan.used_blocks) == 3 + 2 + 1 + 1 <= len(plan.block_expert)


def test_few_pairs_have_few_blocks():
    """One each at most; and where all have one, the slot of pairs without an expert is still free."""
    experts, block_size = 1000, 16
    assert len(planner(experts, block_size)(np.arange(6, dtype=np.int32)[:, None]).block_expert) == 6
    absent = np.array([[7], [3], [experts], [999]], np.int32)
    plan = planner(experts, block_size)(absent)
    assert len(plan.block_expert) == 4 and int(plan.used_blocks) == 3
    assert plan.slot[2, 0] == 63 and plan.source[3, 15] == 4


@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (5, 100), (4096, 16), (10**6, 7), (300, 3)])
def test_block_size(pairs, experts):
    """A power of two from 8 to 256, so that padding at most about doubles the rows of evenly used experts."""
    size = block_size_for(pairs, experts)
    assert 8 <= size <= 256 and size & (size - 1) == 0
    assert size == 8 or size <= pairs / experts


def test_too_large_for_the_sort_key():
    """Refused, not silently wrong."""
    indices = jax.ShapeDtypeStruct((2**22, 2**3), jnp.int32)
    with pytest.raises(ValueError, match="32-bit"):
        jax.eval_shape(lambda i: plan_dispatch(i, 1024, 256), indices)


@pytest.mark.slow_but("1", "5")
@pytest.mark.parametrize("used", [1, 5, 12])
def test_only_filled_blocks_are_fetched(monkeypatch, used):
    """Blocks that hold a row are those of `blocks_of`, alone or among others'; of the rest, two at most are written."""
    monkeypatch.setattr(api, "FETCHED_ROWS", 24)  # 3 blocks at once, of 12
    tokens, experts = 12, 12
    indices = np.where(np.arange(tokens) < used, np.arange(tokens), experts).astype(np.int32)[:, None]
    plan = plan_dispatch(jnp.asarray(indices), experts, 8)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, 4)))
    assert plan.source.shape[0] == 12 and int(plan.used_blocks) == used
    fetched = jax.jit(api.filled_blocks_of)(x, plan)
    np.testing.assert_array_equal(fetched[: 8 * used], blocks_of(x, plan)[:used].reshape(-1, 4))
    into = jnp.full((2 * 12 * 8, 4), 7.0)
    second = jax.jit(api.filled_blocks_of)(x, plan, into, 12)
    np.testing.assert_array_equal(second[96 : 96 + 8 * used], fetched[: 8 * used])
    assert np.all(np.asarray(second[:96]) == 7) and np.all(np.asarray(second[96 + 8 * -(-used // 3) * 3 :]) == 7)
