"""A thousand requests to the real engine, by the client from PyPI."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="extra `serve`")
pytest.importorskip("uvicorn", reason="extra `serve`")
pytest.importorskip("openai", reason="the client that people have")

from dreamer_jax.inference import Adaptive, Static, fold
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.serving import engine as served_engine
from dreamer_jax.serving.engine import ServedEngine
from dreamer_jax.serving.options import Options
from dreamer_jax.serving.prompts import Prompts
from dreamer_jax.serving.server import Served, Server
from tests.families import test_huginn
from tests.serving.asking import until
from tests.serving.fake import TOKENIZER
from tests.serving.many import OPEN, ask_all
from tests.serving.served import NAME, running

REQUESTS, DIFFERENT = 1000, 40
LETTERS = 128
"""Tokens, each of which is a text."""


@pytest.fixture
def engine(monkeypatch):
    """Of a tiny model, with fewer pages than its places could fill."""
    monkeypatch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(), Choosing(True)))
    config = dataclasses.replace(test_huginn.TINY, vocab_size=LETTERS, dtype="float32")
    options = Options(rows=16, context=64, page=4, pages=300, chunk=16, logprobs=0, queue=OPEN)
    engine = ServedEngine(fold(config, test_huginn.drawn_params(config), {}), [Static(), Adaptive()], options)
    until(lambda: engine.ready or not engine._thread.is_alive(), 300)
    return engine


def requests() -> list[dict[str, Any]]:
    """All that are different: greedy ones and others, of all depths and of tokens that stop early."""
    rng, found = np.random.default_rng(0), []
    for number in range(DIFFERENT):
        prompt = rng.integers(0, LETTERS, rng.integers(1, 24)).tolist()
        early = {"sampler": {"name": "adaptive", "threshold": float(rng.choice([0.2, 0.5, 1.0]))}}
        extra = ({}, early, {"depth": test_huginn.TINY.depth - 1}, early)[number % 4]
        sampling = {"temperature": 0.8, "seed": int(rng.integers(99))} if rng.integers(2) else {"temperature": 0}
        own = {"model": NAME, "prompt": prompt, "max_tokens": int(rng.integers(1, 40)), "extra_body": extra}
        found.append(own | sampling)
    return found


def resident() -> float:
    """MiB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


@pytest.mark.slow  # a thousand requests
def test_a_thousand_requests_to_the_real_engine(engine):
    """None is lost, none is mixed up with another, and memory stays as it is, though some clients leave and some read
    slowly."""
    different, sizes, rng = requests(), [], np.random.default_rng(1)
    order = [*rng.permutation(np.arange(REQUESTS) % DIFFERENT).tolist()]
    answered = 0

    def then(number: int) -> None:
        nonlocal answered
        answered += 1
        if answered % (REQUESTS // 10) == 0:
            gc.collect()
            sizes.append(resident())

    prompts = Prompts(TOKENIZER, LETTERS, "{question}\n")
    with running(Server(engine, Served(NAME, prompts, engine.options.context))) as url:
        alone = [asyncio.run(ask_all(url, [each], lambda number: None))[0] for each in different]
        begun = time.perf_counter()
        pace = [0.0] * 12 + [0.05, 0.05, None, None]
        found = asyncio.run(ask_all(url, [different[n] for n in order], then, pace))
        seconds = time.perf_counter() - begun
        until(lambda: not any(engine.view().rows), 30)
        view = engine.view()
    left = sum(its is None for its in found)
    print(f"{REQUESTS} requests, {left} left, in {seconds:.1f} s: {view.tokens} tokens, {view.finished}")
    print("MiB after every tenth:", ", ".join(f"{size:.1f}" for size in sizes))
    assert left == sum(number % 16 == 15 for number in range(REQUESTS))
    for n, its in zip(order, found, strict=True):
        assert its is None or its == alone[n]
    assert len({its.text for its in alone if its}) > 0.9 * DIFFERENT
    assert sum(view.finished.values()) == REQUESTS + DIFFERENT and "failed" not in view.finished
    assert view.free_pages == view.pages and not engine._jobs and not view.queue
    assert sizes[-1] < sizes[3] + 8
