"""Every family that generates text can be served, though none knows of pages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dreamer_jax.families import build, initialise
from dreamer_jax.inference import Adaptive, Engine, Static, fold
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Programs
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.serving import engine as served_engine
from dreamer_jax.serving import programs
from dreamer_jax.serving.contract import Request
from dreamer_jax.serving.engine import ServedEngine, fits
from dreamer_jax.serving.options import Options
from pallas_kernels.sequence_attention.api import SequenceAttention
from tests.families.cases import TINY_MODELS, drawn_params, small_config
from tests.pallas_kernels.compiling import KINDS, compiling_for
from tests.serving.cases import Taken, until, wide

MODELS = {name: config for name, config in TINY_MODELS.items() if build(config).flags.generates}
MODELS |= {
    "layered": small_config("LA"),
    "windowed": small_config(da_window=2),
    "some_depths": small_config(da_every=2, sa_every=2, decoding_size=10),
    "some_dimensions": small_config(dimensions_per_token=2, expert_subset="hierarchical"),
    "huginn-full": dataclasses.replace(TINY_MODELS["huginn"], cache="full"),
    "huginn-always-last": dataclasses.replace(TINY_MODELS["huginn"], cache="always-last"),
    "ouro-halting": dataclasses.replace(TINY_MODELS["ouro"], exit_threshold=0.4),
    "recursive-propagating": dataclasses.replace(TINY_MODELS["recursive"], refill="propagate"),
}
ON_MESH = ("moeut", "ouro-halting", "recursive-propagating")
"""Experts that aren't divided; tokens that stop by the model's own rule; layers that are called to fill slots."""


@pytest.fixture(scope="module", autouse=True)
def float64():
    with wide():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_pages(name):
    """Also where some of its layers, such as those before the loop, are none; with the numbers of its rows."""
    family = build(MODELS[name])
    model = FoldedModel(*nn.meta.unbox(family.shapes), family, family.depth)
    rows = jax.eval_shape(lambda its: its.empty_slots(22, 2), model)
    for kind in (None, *KINDS.values()):
        with contextlib.nullcontext() if kind is None else compiling_for(kind):
            pages = jax.eval_shape(functools.partial(programs.pool, 22, 2), model)
        numbers = [sum(leaf.size for leaf in jax.tree.leaves(its)) for its in (rows, pages)]
        assert numbers[0] == numbers[1] if kind is None else numbers[0] <= numbers[1]


@functools.cache
def folded(name: str) -> FoldedModel:
    config = dataclasses.replace(MODELS[name], dtype="float64")
    _, state = nn.meta.unbox(initialise(build(config), jax.random.key(0)))
    return fold(config, drawn_params(MODELS[name]), state)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_family_generates_alike_with_its_heads_side_by_side(name, monkeypatch):
    """As on a TPU: the same tokens at the same depths, also where positions stop early."""
    model, prompts = folded(name), [list(range(2 + 9 * n)) for n in range(2)]
    samplers = [its for its in (Static(), Adaptive(threshold=0.3)) if fits(its, model)]
    plain = [Engine(model, sampler).generate(prompts, 10) for sampler in samplers]
    monkeypatch.setattr(SequenceAttention, "flattens", lambda _: True)
    compiled = Programs(None)
    flat = [leaf.ndim == 4 for leaf in jax.tree.leaves(compiled.empty_slots(model, 2, 3)) if leaf.dtype == jnp.float64]
    assert any(flat) or name == "cotformer"
    for sampler, expected in zip(samplers, plain, strict=True):
        engine = Engine(model, sampler)
        engine._programs = compiled
        found = engine.generate(prompts, 10)
        assert [(row.tokens, row.depths) for row in found] == [(row.tokens, row.depths) for row in expected]


@pytest.mark.slow  # programs of a dozen models
@pytest.mark.parametrize(("name", "devices"), [*((name, 1) for name in MODELS), *((name, 4) for name in ON_MESH)])
def test_a_family_is_served_like_it_generates(name, devices, monkeypatch):
    """Static and adaptive rows, prompts of several chunks, pages that run short; also on four devices, of which two
    share what can be divided."""
    if jax.device_count() < devices:
        pytest.skip("needs four devices")
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]).reshape(2, 2), ("data", "expert"))
    monkeypatch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(),))
    model = folded(name)
    samplers = [its for its in (Static(), Adaptive(threshold=0.3)) if fits(its, model)]
    sizes = Options(rows=2 * devices, context=32, page=2, chunk=4, pages=22 * devices, logprobs=0)
    engine = ServedEngine(model, samplers, sizes, mesh=mesh)
    until(lambda: engine.ready or not engine._thread.is_alive())
    rng = np.random.default_rng(0)
    requests = [
        Request(tuple(rng.integers(0, 23, 3 * (n % 5) + 1).tolist()), 10, sampler=samplers[n % len(samplers)])
        for n in range(5 * devices)
    ]
    taken = [Taken() for _ in requests]
    for request, its in zip(requests, taken, strict=True):
        engine.submit(request, its)
    for request, its in zip(requests, taken, strict=True):
        row = Engine(model, request.sampler).generate([list(request.prompt)], 10)[0]
        assert (its.wait().tokens, its.depths) == (row.tokens, row.depths), request
    engine.close(0)


@pytest.mark.slow_but("ouro")
@pytest.mark.parametrize("name", ["huginn-always-last", "ouro"])
def test_what_others_have_left_in_the_pool_changes_nothing(name, monkeypatch):
    """A prompt's last chunk reaches beyond the pages that the request has."""
    monkeypatch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(True, True, likeliest),))
    engine = ServedEngine(folded(name), [Static()], Options(rows=2, context=32, page=2, chunk=8, pages=32, logprobs=1))
    until(lambda: engine.ready or not engine._thread.is_alive())

    def answers(lengths: tuple[int, ...], most: int, seed: int) -> list[Any]:
        draws = np.random.default_rng(seed)
        taken = [Taken() for _ in lengths]
        for length, its in zip(lengths, taken, strict=True):
            engine.submit(Request(tuple(draws.integers(0, 23, length).tolist()), most, logprobs=1), its)
        return [(its.wait().tokens, its.logprobs) for its in taken]

    fresh = answers((9, 10, 17), 1, 0)
    answers((12, 12, 12, 12), 20, 1)  # they fill the pool
    assert answers((9, 10, 17), 1, 0) == fresh
    engine.close(0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "ouro" else pytest.mark.slow) for name in MODELS]
)
def test_a_request_whose_numbers_overflow_spoils_itself_only(name, monkeypatch):
    """Neither those that get its row and its pages later nor the one beside it. It gets no token that nothing chose. Of
    families whose head is the embedding, and of those that ponder over all embeddings, nobody gets any."""
    monkeypatch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(),))
    model, bad, prompt = folded(name), 22, tuple(range(1, 7))

    def overflown(path: Any, its: jax.Array) -> jax.Array:
        tables = [axis for axis, size in enumerate(its.shape) if size == model.family.config.vocab_size]
        return its.at[bad].set(jnp.nan) if tables[:1] == [0] and "embedding" in jax.tree_util.keystr(path) else its

    spoilt = model.replace(params=jax.tree_util.tree_map_with_path(overflown, model.params))
    engine = ServedEngine(spoilt, [Static()], Options(rows=2, context=32, page=2, chunk=4, pages=20, logprobs=0))
    until(lambda: engine.ready or not engine._thread.is_alive())
    before, beside, spoilt_one, after = Taken(), Taken(), Taken(), [Taken() for _ in range(3)]
    engine.submit(Request(prompt, 6), before)
    before.wait()
    engine.submit(Request((bad, *range(5, 15)), 20), spoilt_one)
    for its in (beside, *after):
        engine.submit(Request(prompt, 6), its)
    assert [its.wait().tokens for its in (beside, *after)] == [before.tokens] * 4
    assert (spoilt_one.wait().finish, spoilt_one.tokens) == ("failed", [])
    all_read = name.startswith("ponder") or bool(jnp.isnan(model.family.head(spoilt.params)).any())
    assert (before.tokens == []) == all_read
    engine.close(0)
