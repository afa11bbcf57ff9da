"""The weight gradient of a grouped product on a TPU, added in place to float32 totals.

    totals[e] += sum over the rows r of expert e of left[r]^T right[r]

The rows may be those of several depths at once: the more of them share one reading and writing of an expert's total,
the less traffic. A total is fetched one expert ahead and written back behind, from three buffers in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch.stream import compile_for
from pallas_kernels.tiles import Generation

BUFFERS = 3


class Visits(NamedTuple):
    """The blocks of rows to work through, in ascending order of their expert.

    Attributes:
        block: [V] int32, where the block is among the rows.
        expert: [V] int32.
        ends: [E] int32, the visit after each expert's last.
        used: [1] int32, visits that count; they come first.
    """

    block: jax.Array
    expert: jax.Array
    ends: jax.Array
    used: jax.Array


def visits_of(num_blocks: jax.Array, room: int) -> Visits:
    """The visits to the blocks of several dispatch plans, whose blocks in use lie one after another in memory.

    Args:
        num_blocks: [k, E] int32, the blocks each expert fills in each plan.
        room: blocks that there is room for.
    """
    plans, num_experts = num_blocks.shape
    ends = jnp.cumsum(jnp.sum(num_blocks, axis=0))
    visit = jnp.arange(room, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, visit, side="right").astype(jnp.int32), num_experts - 1)
    used = ends[-1:]
    if plans == 1:
        return Visits(jnp.minimum(visit, jnp.maximum(used - 1, 0)), expert, ends, used)
    through = jnp.cumsum(num_blocks, axis=0)[:, expert]  # [k, V], blocks of the visit's expert up to each plan
    rank = visit - (ends[expert] - through[-1])
    plan = jnp.minimum(jnp.sum(through <= rank, axis=0), plans - 1)
    inside = jnp.cumsum(num_blocks.reshape(-1)).reshape(plans, num_experts) - num_blocks  # blocks before each
    before = (through - num_blocks[:, expert])[plan, visit]
    block = jnp.where(visit < used, inside[plan, expert] + rank - before, 0)
    return Visits(block.astype(jnp.int32), expert, ends, used)


def accumulate(
    totals: Sequence[jax.Array],
    lefts: jax.Array,
    rights: Sequence[jax.Array],
    visits: Visits,
    *,
    block: int,
    tile: int,
    target: Generation,
) -> list[jax.Array]:
    """Add the outer products of the visited rows to the totals, in place.

    Args:
        totals: group j's sums [E, n_j, f, h], float32.
        lefts: [n_0 + n_1 + ..., R, f], the groups' left factors. One factor of a product must be zero in padding rows,
            the other finite.
        rights: group j's right factor [R, h].
        visits: the blocks of `block` rows that count, and their experts.
        block: b.
        tile: columns of h worked on at a time, a divisor of it.
        target: what is compiled for.

    Returns:
        The new totals; those of experts without rows are untouched.
    """
    counts = [total.shape[1] for total in totals]
    size, hidden = totals[0].shape[2:]
    if hidden % tile:
        raise ValueError(f"tiles of {tile} columns don't divide {hidden}")
    bounds = _shares(visits, target.cores)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, counts=counts, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(target.cores, hidden // tile, jnp.maximum(jnp.max(jnp.diff(bounds)), 1)),
            in_specs=[*_row_specs(counts, block, size, tile), *[hbm for _ in totals]],
            out_specs=[hbm for _ in totals],
            scratch_shapes=[
                *[pltpu.VMEM((BUFFERS, n, size, tile), jnp.float32) for n in counts],
                pltpu.SemaphoreType.DMA((BUFFERS, len(totals))),
                pltpu.SemaphoreType.DMA((BUFFERS, len(totals))),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(total.shape, total.dtype) for total in totals],
        input_output_aliases={4 + 1 + len(rights) + i: i for i in range(len(totals))},
        cost_estimate=_cost(totals, lefts, rights, hidden // tile),
        name="expert_weight_gradient",
        **compile_for(target, sequential=2),
    )(*visits[:3], bounds, lefts, *rights, *totals)


def _row_specs(counts, block, size, tile) -> list[pl.BlockSpec]:
    """Of the left factors together, and of each right factor: the visited block; when done, the last one again."""

    def visited(core, step, where, bounds):
        return where[jnp.minimum(bounds[core] + step, jnp.maximum(bounds[core + 1] - 1, 0))]

    def right(core, part, step, where, expert, ends, bounds):
        return visited(core, step, where, bounds), part

    def left(core, part, step, where, expert, ends, bounds):
        return 0, visited(core, step, where, bounds), 0

    return [pl.BlockSpec((sum(counts), block, size), left), *[pl.BlockSpec((block, tile), right) for _ in counts]]


def _cost(totals, lefts, rights, passes):
    totals_bytes = 2 * sum(total.size * total.dtype.itemsize for total in totals)
    rows_bytes = (lefts.size * passes + sum(right.size for right in rights)) * lefts.dtype.itemsize
    flops = 2 * lefts.size * totals[0].shape[-1]
    return pl.CostEstimate(flops=flops, bytes_accessed=totals_bytes + rows_bytes, transcendentals=0)


def _shares(visits: Visits, cores: int) -> jax.Array:
    """[cores + 1] int32: where each core's visits begin and end, about as many for each; no expert is divided."""
    wanted = visits.used * jnp.arange(1, cores) // cores
    inner = visits.ends.at[jnp.searchsorted(visits.ends, wanted)].get(mode="clip")
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inner.astype(jnp.int32), visits.used.astype(jnp.int32)])


def _kernel(_, expert_ref, ends_ref, bounds_ref, lefts_ref, *refs, counts, tile):
    groups = len(counts)
    rights, refs = refs[:groups], refs[2 * groups :]  # the totals are read through the aliased outputs
    totals, buffers, (fetched, stored, run_ref) = refs[:groups], refs[groups : 2 * groups], refs[2 * groups :]
    columns = pl.ds(pl.multiple_of(pl.program_id(1) * tile, tile), tile)
    core, step = pl.program_id(0), pl.program_id(2)
    visit, end = bounds_ref[core] + step, bounds_ref[core + 1]

    def fetches(expert, place):
        return [
            pltpu.make_async_copy(total.at[expert, :, :, columns], buffer.at[place], fetched.at[place, i])
            for i, (total, buffer) in enumerate(zip(totals, buffers, strict=True))
        ]

    def stores(expert, place):
        return [
            pltpu.make_async_copy(buffer.at[place], total.at[expert, :, :, columns], stored.at[place, i])
            for i, (total, buffer) in enumerate(zip(totals, buffers, strict=True))
        ]

    @pl.when(visit < end)
    def _():
        expert = expert_ref[visit]
        starts = step == 0
        new = starts | (expert_ref[jnp.maximum(visit - 1, 0)] != expert)
        last = visit + 1 == ends_ref[expert]

        @pl.when(new)
        def _():
            run = jnp.where(starts, 0, run_ref[0] + 1)
            run_ref[0] = run
            pl.when(starts)(lambda: _start(fetches(expert, 0)))
            _wait(fetches(expert, run % BUFFERS))
            following = ends_ref[expert]

            @pl.when(following < end)
            def _():
                place = (run + 1) % BUFFERS
                pl.when(run >= BUFFERS - 1)(lambda: _wait(stores(expert, place)))  # of the run that had this buffer
                _start(fetches(expert_ref[following], place))

        run = run_ref[0]
        place = run % BUFFERS
        n = 0
        for count, right, buffer in zip(counts, rights, buffers, strict=True):
            for i in range(count):
                buffer[place, i] += _outer(lefts_ref[n], right[...])
                n += 1

        @pl.when(last)
        def _():
            _start(stores(expert, place))

            @pl.when(visit + 1 == end)
            def _():
                for back in range(BUFFERS):
                    pl.when(run >= back)(lambda back=back: _wait(stores(expert, (run - back) % BUFFERS)))


def _outer(left, right):
    precision = "highest" if left.dtype == jnp.float32 else None
    contract = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(left, right, contract, preferred_element_type=jnp.float32, precision=precision)


def _start(copies):
    for copy in copies:
        copy.start()


def _wait(copies):
    for copy in copies:
        copy.wait()
