"""Small engines and requests that the tests of serving share."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dreamer_jax.inference import Adaptive, DiffusionForcing, Engine, FoldedModel, Lossless, Sampler, Sampling, Static
from dreamer_jax.inference import engine as plain_engine
from dreamer_jax.inference.model import through_depths
from dreamer_jax.serving.contract import Finish, Request, Token, Update
from dreamer_jax.serving.engine import ServedEngine
from dreamer_jax.serving.options import Options
from tests.inference.test_samplers import model_of

PATIENCE = 300
"""Seconds after which an answer won't come any more."""
OPTIONS = Options(rows=3, context=32, page=2, chunk=4, steps=4, logprobs=3, stop_ids=2)
FORCING = DiffusionForcing(1, wavefront=4)


@contextmanager
def wide() -> Iterator[None]:
    """Float64, where a product's order decides nothing, in every thread."""
    before, cores = jax.config.read("jax_enable_x64"), plain_engine._cores
    jax.config.update("jax_enable_x64", True)
    plain_engine._cores = lambda: 1
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
        plain_engine._cores = cores


def served(
    family: str, options: Options = OPTIONS, samplers: list[Sampler] | None = None, mesh: Mesh | None = None
) -> ServedEngine:
    """An engine that is ready."""
    engine = ServedEngine(model_of(family), samplers, options, mesh=mesh)
    until(lambda: engine.ready or not engine._thread.is_alive())
    assert engine.ready
    return engine


def until(condition: Any) -> None:
    """Wait for something."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Taken:
    """What came of a request.

    Attributes:
        tokens, depths, logprobs: of the answer so far.
        prompt: that came with it.
        finish: how it ended.
        updates: how often something came.
    """

    def __init__(self, then: Any = None):
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt: tuple[Token, ...] = ()
        self.finish: Finish | None = None
        self.updates = 0
        self._ended, self._then = threading.Event(), then

    def __call__(self, update: Update) -> None:
        assert self.finish is None, "something came after the end"
        self.updates += 1
        assert not (update.prompt and self.updates > 1), "the prompt comes first"
        self.prompt += update.prompt
        self.tokens += [token.id for token in update.tokens]
        self.depths += [token.depth for token in update.tokens]
        self.logprobs += [(token.logprob, token.likeliest) for token in update.tokens]
        self.finish = update.finish
        if self._then is not None:
            self._then(self)
        if update.finish is not None:
            self._ended.set()

    def wait(self) -> Taken:
        assert self._ended.wait(PATIENCE)
        return self


def alone(family: str, request: Request) -> tuple[list[int], list[int], str]:
    """What the plain engine answers, with memories in rows: tokens, depths, and how it ends."""
    # The text of the lossless sampler is that of the static one, which tests of samplers show.
    sampler = Static() if isinstance(request.sampler, Lossless) else request.sampler
    engine = _plain(family, sampler, request.depth)
    own = [list(request.prompt)], request.max_tokens, request.sampling, request.stop_ids
    row = engine.generate(*own, numbers=[request.number])[0]
    return row.tokens, row.depths, row.finish


@functools.cache
def _plain(family: str, sampler: Sampler, depth: int | None) -> Engine:
    model: FoldedModel = model_of(family)
    return Engine(model if depth is None else model.replace(total_depth=depth), sampler)


def logarithms(family: str, text: Sequence[int], depth: int | None = None) -> np.ndarray:
    """Of the probabilities of all tokens after each token of a text [S, V], from a pass over the whole text."""
    model: FoldedModel = model_of(family)
    model = model if depth is None else model.replace(total_depth=depth)
    hidden, _ = through_depths(model, jnp.array([text]), jnp.arange(len(text))[None], model.empty_slots(1, len(text)))
    logits = np.asarray(model.logits(hidden))[0]
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def agree(found: Sequence[tuple[int, float | None, Any]], wanted: np.ndarray, likeliest: int) -> None:
    """Tokens with their logarithms and the likeliest ones are as `logarithms` [N, V] has them."""
    for (token, logprob, own), row in zip(found, wanted, strict=True):
        order = np.argsort(-row)[:likeliest]
        assert logprob is not None and abs(logprob - row[token]) < 1e-5 and [each for each, _ in own] == order.tolist()
        np.testing.assert_allclose([value for _, value in own], row[order], atol=1e-5)


def drawn_request(rng: np.random.Generator, family: str, few: bool = False) -> Request:
    """Of any length, sampler, depth and seed; with `few`, such that `alone` needs few programs for several. Prompts
    begin alike, so that some share pages."""
    length, depth = int(rng.integers(1, 14)), model_of(family).total_depth
    prompt = np.where(np.arange(length) < rng.integers(0, 14), 1, rng.integers(0, 23, length))
    samplers: list[Sampler] = [Static(), Adaptive(threshold=float(rng.choice([0.2, 0.5, 1.0]))), Lossless(1)]
    if family == "huginn":
        samplers.append(FORCING)
    sampler = samplers[rng.integers(len(samplers))]
    ranks = {"top_k": 7, "top_p": 0.9} if few or rng.integers(2) else {}
    sampling = (
        Sampling(float(rng.choice([0.7, 1.3])), seed=int(rng.integers(99)), **ranks) if rng.integers(2) else Sampling()
    )
    own_depth = rng.integers(3) == 0 and not isinstance(
        sampler, (DiffusionForcing, Adaptive) if few else DiffusionForcing
    )
    return Request(
        tuple(prompt.tolist()),
        int(rng.integers(1, 16)),
        sampling,
        sampler,
        depth - 1 if own_depth else None,
        int(rng.integers(3)),
        stop_ids=tuple(rng.integers(0, 23, rng.integers(0, 2)).tolist()),
    )


def serve(engine: ServedEngine, requests: list[Request], rng: np.random.Generator) -> list[Taken]:
    """All of them, of which some are there from the start, and others come or go whenever something is delivered."""
    taken: list[Taken] = []
    coming = list(requests)

    def come() -> None:
        if not coming:
            return
        request, number = coming.pop(0), []
        most = int(rng.integers(1, 30))  # tokens after which it isn't wanted any more; most end before

        def then(its: Taken) -> None:
            if its.finish is None and len(its.tokens) >= most:
                engine.cancel(number[0])
            for _ in range(int(rng.integers(0, 3))):
                come()

        taken.append(Taken(then))
        number.append(engine.submit(request, taken[-1]))

    for _ in range(5):
        come()
    until(lambda: not coming and all(its.finish is not None for its in list(taken)))
    return taken


def check(family: str, engine: ServedEngine, requests: list[Request], rng: np.random.Generator) -> list[Taken]:
    """All requests get what they get alone; one that was cancelled gets the beginning."""
    taken = serve(engine, requests, rng)
    for request, its in zip(requests, taken, strict=True):
        tokens, depths, finish = alone(family, request)
        if its.finish == "cancelled":
            tokens, depths = tokens[: len(its.tokens)], depths[: len(its.tokens)]
        else:
            assert its.finish == finish
        assert (its.tokens, its.depths) == (tokens, depths), request
    assert engine.view().free_pages == engine.view().pages and not any(engine.view().rows)
    return taken


def begun_anew(engine: ServedEngine, monkeypatch: Any) -> list[int]:
    """A list that grows when a request has to give its pages back."""
    numbers, put_back = [], engine._scheduler._put_back
    monkeypatch.setattr(engine._scheduler, "_put_back", lambda job: (numbers.append(job.number), put_back(job))[1])
    return numbers
