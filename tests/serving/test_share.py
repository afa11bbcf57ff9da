"""What of the speed-up that exit depths allow is reached, counted in steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.budget.analytic import average_context, flops_by_depth
from dreamer_jax.inference import Sampler
from dreamer_jax.inference.samplers import one_by_one
from dreamer_jax.inference.samplers.contract import Choosing, Tally
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


@dataclass(frozen=True)
class Replayed(Sampler):
    """Tokens stop at recorded depths, which their positions decide: L / 2 on average."""

    name: ClassVar[str] = "replayed"

    def _rule(self) -> one_by_one.Rule:
        recorded = jnp.asarray(np.random.default_rng(0).permutation(np.tile(np.arange(1, DEPTH), 64)), jnp.int32)

        def start(model, flight):
            return jnp.zeros(len(jax.tree.leaves(flight.state)[0]), jnp.int32)

        def check(model, flight, positions, slots, before):
            return before + 1 >= recorded[positions[:, 0] % len(recorded)], before + 1

        return one_by_one.Rule(start, check)

    def carry(self, model, rows):
        """Nothing is on its way."""
        return one_by_one.carry(model, rows, self._rule())

    def decode(self, choosing, model, progress, slots, carried, asked):
        """At the recorded depths."""
        return one_by_one.decode(choosing, model, progress, slots, carried, asked, self._rule())


def replay(steps: int, count: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[View, View]:
    """What an engine has done when the last of so many requests of about so many tokens, all there from the start, has
    just begun, and when all have ended."""
    monkeypatch.setattr("dreamer_jax.serving.engine.choosings", lambda likeliest: (Choosing(False, False, likeliest),))
    options = Options(rows=ROWS, context=tokens * 2 + 16, chunk=16, steps=steps, logprobs=0, queue=count)
    engine = ServedEngine(model_of("ouro").replace(total_depth=DEPTH), [Replayed()], options)
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
        engine.submit(Request(prompt, most, sampler=Replayed()), its)
    assert [len(its.wait().tokens) for its in taken] == lengths
    engine.close(0)
    print(f"{engine.view().tokens} tokens in {time.perf_counter() - started:.1f} s, steps a tick: {steps}")
    return views[0], engine.view()


def test_depth_batching_reaches_nine_tenths_of_the_bound(monkeypatch):
    """Sixteen rows, recorded depths of mean L / 2, as long as requests wait: issue 21."""
    busy, ended = replay(steps=DEPTH // 2, count=64, tokens=64, monkeypatch=monkeypatch)
    prompts = sum(ended.finished.values())  # their last tokens go through all depths
    mean = (ended.depths - DEPTH * prompts) / (ended.tokens - prompts)
    assert mean == pytest.approx(DEPTH / 2, rel=0.05)
    assert ended.busy_row_steps == ended.depths - DEPTH * prompts
    for name, view in (("while requests wait", busy), ("with the last ones", ended)):
        print(f"{name}: {view.busy_row_steps / view.row_steps:.3f} of places busy, share {view.share_of_bound:.3f}")
    assert busy.share_of_bound is not None and busy.share_of_bound >= 0.9


def test_the_share_is_the_quotient_of_two_speed_ups():
    """(F0 + L Fr) / (F0 + s Fr) over (F0 + L Fr) / (F0 + r Fr), of two ticks by hand."""
    family = model_of("dreamer").family
    outside, each = flops_by_depth(family, average_context(32))
    statistics = Statistics(family, 32, depth=3)
    assert statistics.share_of_bound is None
    for steps, work, depths in (([4, 3], [4, 3], [3, 2]), ([4, 0], [4, 0], [1])):
        statistics.count(Tally(*(jnp.array(each) for each in (steps, work, [0, 0], [0, 0]))), places=2)
        statistics.add(depths, decoded=True)
    statistics.add([3], decoded=False)
    reached, bound = (outside + 3 * each) / (outside + 16 / 3 * each), (outside + 3 * each) / (outside + 2 * each)
    assert statistics.share_of_bound == pytest.approx(reached / bound)
    view = statistics.view((), 0, 1, 1)
    assert (view.steps, view.row_steps, view.busy_row_steps, view.tokens, view.depths) == (8, 16, 11, 4, 9)
