"""A step takes some rows of a group: which, and that the others stay as they are."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.benchmarks.serving import Replayed
from dreamer_jax.blocks.memory import in_pages
from dreamer_jax.inference.programs import Kinds
from dreamer_jax.inference.samplers import one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Block, Carried, Choosing, Progress
from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.serving import programs
from dreamer_jax.serving.groups import takes_static
from tests.inference.test_samplers import model_of
from tests.serving.cases import wide

ROWS = 7


@pytest.fixture(scope="module", autouse=True)
def float64():
    with wide():
        yield


def block_of(pool: object = ()) -> Block:
    """Of rows that are all different, with two slots a row."""
    numbers = jnp.arange(ROWS)
    progress = Progress(numbers, numbers, numbers > 8, numbers, numbers + 9, numbers + 1)
    walk = one_by_one.Walk(numbers, numbers > 2, numbers * 1.5, (), (), numbers * 0)
    carried = Carried(walk, jnp.arange(3 * 2 * ROWS).reshape(3, 2 * ROWS))
    return Block.empty(Choosing(), progress, pool, carried, 4)


def asked_for(at_once: int) -> Asked:
    stops, numbers = jnp.arange(ROWS)[:, None], jax.tree.map(lambda each: np.full(ROWS, each), Sampling().numbers())
    return Asked(jnp.int32(4), stops, numbers, (jnp.arange(ROWS), jnp.float32(0.5)), at_once=at_once)


def test_a_part_has_its_rows_and_gives_them_back():
    """Rows, their two slots, and their lines of the table; everything else stays."""
    model, picks = model_of("dreamer"), jnp.array([5, 0, 3])
    table = jnp.arange(2 * ROWS).reshape(ROWS, 2)
    block = block_of(in_pages(programs.pool(2 * ROWS, 2, model), table))
    part, its = block.part(picks), asked_for(3).part(picks)
    assert part.carried.by_row.state.tolist() == [7.5, 0, 4.5] and part.progress.positions.tolist() == [5, 0, 3]
    assert part.carried.by_slot[0].tolist() == [10, 11, 0, 1, 6, 7]
    assert its.stop_ids.tolist() == [[5], [0], [3]]
    assert its.settings[0].tolist() == [5, 0, 3] and its.settings[1] == 0.5
    assert {each.tolist()[0][0] for each in (kept.table for kept in _memories(part.slots))} == {10}

    changed = part._replace(tokens=part.tokens - 8, rounds=part.rounds + 1)
    changed = changed._replace(carried=Carried(part.carried.by_row, -part.carried.by_slot))
    after = block.put_back(changed, picks)
    rows = np.isin(np.arange(ROWS), picks)
    np.testing.assert_array_equal(after.tokens, np.broadcast_to(np.where(rows[:, None], -9, -1), (ROWS, 4)))
    np.testing.assert_array_equal(after.carried.by_slot, np.where(np.repeat(rows, 2), -1, 1) * block.carried.by_slot)
    assert after.rounds == 1 and jax.tree.structure(after) == jax.tree.structure(block)
    for kept, before in zip(_memories(after.slots), _memories(block.slots), strict=True):
        np.testing.assert_array_equal(kept.table, before.table)
    jax.tree.map(np.testing.assert_array_equal, after.progress, block.progress)


def _memories(slots: object) -> list:
    return jax.tree.leaves(slots, is_leaf=lambda kept: hasattr(kept, "paged"))


def test_nobody_is_passed_over():
    """Of seven rows, two are taken at a time: each is among them at least every fourth time, though one is missing now
    and then, and those that aren't wanted are never taken for one that is."""
    block, rng, last = block_of(), np.random.default_rng(0), np.zeros(ROWS, int)

    def take(part: Block, its: Asked, rows: jax.Array) -> Block:
        taken.extend(part.progress.rows[rows].tolist())
        walk = part.carried.by_row
        return part._replace(
            carried=part.carried._replace(by_row=walk._replace(waited=jnp.where(rows, 0, walk.waited)))
        )

    for number in range(1, 41):
        walk, taken = block.carried.by_row, []
        block = block._replace(carried=block.carried._replace(by_row=walk._replace(waited=walk.waited + 1)))
        wanted = rng.random(ROWS) < 0.9
        block = one_by_one.of_some(take, block, asked_for(2), jnp.asarray(wanted))
        assert len(taken) == 2 and wanted[taken].all()
        last[taken] = number
        assert (number - last[wanted] < 4 + np.sum(~wanted)).all()


@pytest.mark.slow
def test_no_memory_is_copied():
    """Neither at a border nor in a step: the compiled tick has no copy of any of the pool's arrays. In Huginn prelude
    and coda have keys of their own."""
    model, sampler, places, pages, size = model_of("huginn"), Replayed((1, 3)), 6, 77, 5
    pool = jax.eval_shape(lambda: programs.pool(pages, size, model))
    shape = jax.ShapeDtypeStruct
    numbers = jax.tree.map(lambda each: shape((places,), each.dtype), Sampling(1.0).numbers())
    table, stops, one = shape((places, 9), jnp.int32), shape((places, 2), jnp.int32), shape((), jnp.int32)
    rows = programs.Rows(table, shape((places,), bool), stops, numbers, (), one, shape((), jnp.float32))
    own = jax.eval_shape(lambda: programs.places(sampler, places, model))
    tick = programs.programs_for(None).tick
    compiled = tick.lower(Kinds(Choosing(), sampler), 3, 2, model, pool, *own, rows).compile()
    text = str(compiled.as_text())
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(pool)}
    for each in shapes:
        assert re.search(rf"\w\[{each}\]\S* parameter\(", text)  # that is how it is written
        assert not re.search(rf"= \w+\[{each}\]\S* copy\(", text)


@pytest.mark.parametrize("name", CRITERIA)
def test_a_static_row_never_stops_beside_adaptive_ones(name):
    """Also where a settled stream's cosine is above 1 by a rounding, so that the criterion's value is below 0."""
    program, criterion = programs.OneByOne(name), CRITERIA[name]
    if takes_static(program):
        threshold = program.numbers()[0]
        assert not criterion.stops(jnp.array([0.0, -1.2e-7, -1.0]), threshold).any()
    else:
        assert criterion.reads_logits or criterion.rises
