"""What of the speed-up that exit depths allow is reached, counted in steps."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from dreamer_jax.benchmarks.serving import Replayed
from dreamer_jax.budget.analytic import average_context, flops_by_depth
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.serving.contract import Request, View
from dreamer_jax.serving.engine import ServedEngine
from dreamer_jax.serving.options import Options
from dreamer_jax.serving.statistics import Statistics
from tests.inference.test_samplers import model_of
from tests.serving.cases import Taken, until, wide

DEPTH, ROWS = 8, 16


@pytest.fixture(scope="module", autouse=True)
def float64():
    with wide():
        yield


RECORDED = Replayed(tuple(np.random.default_rng(0).permutation(np.tile(np.arange(1, DEPTH), 64)).tolist()))
"""Depths of L / 2 on average."""


def replay(count: int, tokens: int, monkeypatch: pytest.MonkeyPatch, **changes: float) -> tuple[View, View]:
    """What an engine has done when the last of so many requests of about so many tokens, all there from the start, has
    just begun, and when all have ended."""
    monkeypatch.setattr("dreamer_jax.serving.engine.choosings", lambda likeliest: (Choosing(False, False, likeliest),))
    options = Options(rows=ROWS, context=tokens * 2 + 16, chunk=16, steps=4, logprobs=0, queue=count)
    options = dataclasses.replace(options, **changes)
    engine = ServedEngine(model_of("ouro").replace(total_depth=DEPTH), [RECORDED], options)
    until(lambda: engine.ready or not engine._thread.is_alive())
    rng, views = np.random.default_rng(1), []
    started = time.perf_counter()

    def look(its: Taken) -> None:
        if not engine.view().queue and engine.view().finished:
            views.append(engine.view())

    taken = [Taken(look) for _ in range(count)]
    lengths = rng.integers(tokens // 2, tokens * 3 // 2, count).tolist()
    for its, most in zip(taken, lengths, strict=True):
        prompt = tuple(rng.integers(0, 23, rng.integers(1, 16)).tolist())
        engine.submit(Request(prompt, most, sampler=RECORDED), its)
    assert [len(its.wait().tokens) for its in taken] == lengths
    engine.close(0)
    print(f"{engine.view().tokens} tokens in {time.perf_counter() - started:.1f} s, {changes}")
    return views[0], engine.view()


@pytest.fixture(scope="module")
def batching() -> tuple[View, View]:
    """Of rows at depths of their own."""
    with pytest.MonkeyPatch.context() as patch:
        return replay(48, 64, patch)


@pytest.mark.slow
def test_depth_batching_reaches_nine_tenths_of_the_bound(batching):
    """Sixteen rows, recorded depths of mean L / 2, as long as requests wait: issue 21."""
    busy, ended = batching
    prompts = sum(ended.finished.values())  # their last tokens go through all depths
    mean = (ended.depths - DEPTH * prompts) / (ended.tokens - prompts)
    assert mean == pytest.approx(DEPTH / 2, rel=0.05)
    assert ended.busy_row_steps == ended.depths - DEPTH * prompts
    for name, view in (("while requests wait", busy), ("with the last ones", ended)):
        print(f"{name}: {view.busy_row_steps / view.row_steps:.3f} of places busy, share {view.share_of_bound:.3f}")
    print(f"outside of the depths {busy.border_rows / busy.decoded:.3f} places a token")
    assert busy.share_of_bound is not None and busy.share_of_bound >= 0.9
    assert busy.border_rows < 1.25 * busy.decoded  # 4 if nobody waited; more than 1 while the places fill


@pytest.mark.slow
def test_rows_that_wait_for_the_slowest_take_more_steps(batching, monkeypatch):
    """The same work where nothing is read before all rows have arrived: of 16 draws from 1 .. 7 the largest is 6.9 on
    average, so that is what a token of each row takes in place of 4."""
    views = batching[0], replay(48, 64, monkeypatch, places=ROWS, collect=1.0)[0]
    largest = np.sum(1 - (np.arange(DEPTH - 1) / (DEPTH - 1)) ** ROWS)
    places = [view.row_steps / view.busy_row_steps * DEPTH / 2 for view in views]
    print(
        f"places a token: {places[0]:.2f}, waiting for the slowest {places[1]:.2f}; {largest:.2f} if all rows had one"
    )
    assert places[0] < 1.1 * DEPTH / 2 and places[1] > 0.95 * largest


def test_the_share_is_the_quotient_of_two_speed_ups():
    """(F0 + L Fr) / (b F0 + s Fr) over (F0 + L Fr) / (F0 + r Fr), of two ticks by hand."""
    family = model_of("dreamer").family
    outside, each = flops_by_depth(family, average_context(32))
    statistics = Statistics(family, 32, depth=3)
    assert statistics.share_of_bound is None
    for steps, busy, depths in ((4, 7, [3, 2]), (4, 4, [1])):
        statistics.count(steps, 2, busy, borders=2)
        statistics.add(depths, decoded=True)
    statistics.add([3], decoded=False)
    reached, bound = (
        (outside + 3 * each) / (4 / 3 * outside + 16 / 3 * each),
        (outside + 3 * each) / (outside + 2 * each),
    )
    assert statistics.share_of_bound == pytest.approx(reached / bound)
    view = statistics.view((), 0, 1, 1)
    assert (view.steps, view.row_steps, view.busy_row_steps, view.tokens, view.depths) == (8, 16, 11, 4, 9)
    assert (view.decoded, view.decoded_depths, view.border_rows) == (3, 6, 4)
