"""Dropless dispatch: every (token, choice) pair gets a slot in a buffer of blocks, each block of one expert.

Pairs are sorted by expert and every expert's run is padded up to whole blocks, so that a grouped matrix product
becomes a batch of equal ones. The plan is integers only; moving rows with it is a gather in both directions
(`blocks_of` by `source`, `rows_of` by `slot`), never a scatter of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.dispatch import tpu

FETCHED_ROWS = 2048
"""Rows that `filled_blocks_of` fetches at once: what else is fetched in vain is at most as many."""


class Dispatch(NamedTuple):
    """Where each (token, choice) pair goes. N blocks of b slots; a slot no pair fills is padding.

    Attributes:
        slot: [T, k] int32, the slot of each pair.
        source: [N, b] int32, the pair (t * k + choice) in each slot; T * k marks padding.
        block_expert: [N] int32, the expert of each block; unused blocks repeat the last expert.
        first_block: [E] int32, the first block of each expert.
        num_blocks: [E] int32, the blocks each expert fills.
    """

    slot: jax.Array
    source: jax.Array
    block_expert: jax.Array
    first_block: jax.Array
    num_blocks: jax.Array

    @property
    def used_blocks(self) -> jax.Array:
        """Scalar int32: blocks that hold at least one pair; they come first."""
        return self.first_block[-1] + self.num_blocks[-1]


def block_size_for(pairs: int, num_experts: int) -> int:
    """Rows of a block, a power of two: near a third of the mean rows an expert gets, 32 to 256 where there are enough.

    Smaller blocks waste fewer padded rows, larger ones make better matrix products and fetch an expert's weights
    less often. Measured on two CPU cores: 128 is best at a mean of 512 rows, 64 at 256, 32 to 64 at 60.
    """
    mean = max(1, pairs // num_experts)
    smallest = min(32, max(8, 1 << (mean - 1).bit_length()))
    return max(smallest, min(256, 1 << max(0, (mean // 3).bit_length() - 1)))


def plan_dispatch(indices: jax.Array, num_experts: int, block_size: int, multiple: int = 1) -> Dispatch:
    """Sort the (token, choice) pairs by expert into blocks.

    On a TPU by counting (a general sort takes the compiler most of a minute there), elsewhere by one sort.

    Args:
        indices: [T, k] int32, the experts each token selected. E stands for no expert here (expert parallelism: the
            pair is another device's); such a pair gets the last slot, which then is always a padding slot.
        num_experts: E.
        block_size: b, rows of a block.
        multiple: N is rounded up to one of it.

    Returns:
        The plan, with N = (T*k + min(E, T*k) (b-1)) // b blocks: enough for any distribution, so nothing is ever
        dropped.
    """
    pairs = indices.size
    total = plan_blocks(pairs, num_experts, block_size, multiple)
    slots = _slots_by_counting if tiles.generation() else _slots_by_sorting
    return plan_from(*slots(indices.reshape(-1), num_experts, block_size), indices.shape, total, block_size)


def plan_blocks(pairs: int, num_experts: int, block_size: int, multiple: int = 1) -> int:
    """N of `plan_dispatch`. Few pairs reach few experts: a step of decoding has a block for each pair, not for each
    expert."""
    reached = min(num_experts, pairs)
    return -(-((pairs + reached * (block_size - 1)) // block_size) // multiple) * multiple


def plan_from(slot: jax.Array, num_blocks: jax.Array, shape: tuple[int, ...], total: int, block_size: int) -> Dispatch:
    """The whole plan from the pairs' slots.

    Args:
        slot: [T*k] int32, the slot of each pair, anything past the last for pairs without an expert.
        num_blocks: [E] int32, blocks of each expert.
        shape: (T, k).
        total: N.
        block_size: b.
    """
    pairs, size = slot.size, total * block_size
    pair = jnp.arange(pairs, dtype=jnp.int32)
    outside = slot >= size
    source = jnp.full(size, pairs, jnp.int32).at[jnp.where(outside, size + pair, slot)]
    ends = jnp.cumsum(num_blocks)
    block_expert = jnp.searchsorted(ends, jnp.arange(total, dtype=jnp.int32), side="right", method=_search())
    return Dispatch(
        slot=jnp.minimum(slot, size - 1).reshape(shape),
        source=source.set(pair, mode="drop", unique_indices=True).reshape(total, block_size),
        block_expert=jnp.minimum(block_expert, num_blocks.size - 1).astype(jnp.int32),
        first_block=ends - num_blocks,
        num_blocks=num_blocks,
    )


NOWHERE = jnp.iinfo(jnp.int32).max
"""The slot of a pair without an expert, before the plan gives it the last one."""


def _slots_by_sorting(expert: jax.Array, num_experts: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """[T*k] experts -> their slots [T*k], and the blocks of each expert [E]."""
    order, sorted_expert, bounds = sorted_pairs(expert, num_experts)
    num_blocks = (jnp.diff(bounds) + block_size - 1) // block_size
    first_block = jnp.cumsum(num_blocks) - num_blocks
    shift = jnp.append(first_block * block_size, 0) - bounds  # slot - rank in the sorted order
    sorted_slot = jnp.arange(expert.size, dtype=jnp.int32) + shift[sorted_expert]
    sorted_slot = jnp.where(sorted_expert < num_experts, sorted_slot, NOWHERE)
    return jnp.zeros(expert.size, jnp.int32).at[order].set(sorted_slot, unique_indices=True), num_blocks


def sorted_pairs(expert: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pairs by their expert, by one sort.

    Args:
        expert: [T*k] int32; E stands for none.
        num_experts: E.
    Returns:
        The pairs in order [T*k], their experts [T*k], and where each expert's begin [E + 1].
    """
    pairs = expert.size
    # One sort of a single packed key is several times faster than a stable argsort of (expert, pair).
    bits = max(1, (pairs - 1).bit_length())
    if bits + num_experts.bit_length() > 32:
        raise ValueError(f"{pairs} pairs times {num_experts} experts don't fit a 32-bit sort key; use microbatches")
    packed = jnp.sort((expert.astype(jnp.uint32) << bits) | jnp.arange(pairs, dtype=jnp.uint32))
    order = (packed & ((1 << bits) - 1)).astype(jnp.int32)
    sorted_expert = (packed >> bits).astype(jnp.int32)
    wanted = jnp.arange(num_experts + 1, dtype=jnp.int32)
    bounds = jnp.searchsorted(sorted_expert, wanted, method=_search()).astype(jnp.int32)
    return order, sorted_expert, bounds


def _search() -> str:
    """How numbers are found in a sorted array. By halves is a loop, each turn of which is several launches on a GPU."""
    return "compare_all" if jax.default_backend() == "gpu" else "scan"


def _slots_by_counting(expert: jax.Array, num_experts: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """As `_slots_by_sorting`, without a sort."""
    counts = jnp.sum(expert[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    num_blocks = (counts + block_size - 1) // block_size
    first_slot = (jnp.cumsum(num_blocks) - num_blocks) * block_size
    slot = tpu.slots(expert, first_slot, target=tiles.generation() or tiles.INTERPRETED)
    return jnp.where(expert < num_experts, slot, NOWHERE), num_blocks


def blocks_of(x: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows of tokens in block order: [T, c] -> [N, b, c]. Padding slots hold some token's row: mask what you sum."""
    choices = plan.slot.shape[1]
    token = jnp.minimum(plan.source // choices, x.shape[0] - 1)
    return x.at[token].get(mode="promise_in_bounds")


def filled_blocks_of(
    x: jax.Array, plan: Dispatch, into: jax.Array | None = None, first_block: jax.Array | int = 0
) -> jax.Array:
    """Rows of tokens in block order, flat, for kernels, which never look at unused blocks: those aren't fetched.

    There is room for any routing: half as much again as is used or, under expert parallelism, several times as much.

    Args:
        x: [T, c].
        plan: N blocks of b.
        into: [R, c], written over in place; None for a fresh array, undefined in unused blocks.
        first_block: where the plan's blocks begin in it.

    Returns:
        [N b, c], or `into`'s shape.
    """
    total, size = plan.source.shape
    count = min(total, max(1, FETCHED_ROWS // size))
    token = jnp.minimum(plan.source // plan.slot.shape[1], x.shape[0] - 1)

    def fetch(i, blocks):
        first = jnp.minimum(i * count, total - count)
        rows = x.at[jax.lax.dynamic_slice_in_dim(token, first, count)].get(mode="promise_in_bounds")
        return jax.lax.dynamic_update_slice_in_dim(blocks, rows, first_block + first, 0)

    out = jax.lax.empty((total * size, x.shape[1]), x.dtype) if into is None else into
    blocks = jax.lax.fori_loop(0, -(-plan.used_blocks // count), fetch, out.reshape(-1, size, x.shape[1]))
    return blocks.reshape(out.shape)


def rows_of(blocks: jax.Array, plan: Dispatch) -> jax.Array:
    """Rows back in token order: [N, b, c] -> [T, k, c]."""
    flat = blocks.reshape(-1, blocks.shape[-1])
    return flat.at[plan.slot].get(mode="promise_in_bounds")
