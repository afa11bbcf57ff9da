"""A served engine on eight devices: rows over all of them, experts over theirs, and the texts of one device."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dreamer_jax.inference import Adaptive, Lossless, Static
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.inference.sharding import jitted, shard
from dreamer_jax.serving import engine as served_engine
from dreamer_jax.serving.contract import Request
from tests.inference.test_samplers import model_of
from tests.serving.cases import (
    FORCING,
    OPTIONS,
    Taken,
    agree,
    begun_anew,
    check,
    drawn_request,
    logarithms,
    served,
    wide,
)

FEW_PAGES = dataclasses.replace(OPTIONS, rows=15, pages=8 * 16)
"""Steps of two rows a device; up to six can have begun there, which have 16 pages between them and could use 96."""

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.fixture(scope="module", autouse=True)
def float64():
    with wide():
        yield


def mesh_of(data: int, expert: int) -> Mesh:
    """Eight devices."""
    return Mesh(np.array(jax.devices()[: data * expert]).reshape(data, expert), ("data", "expert"))


@pytest.fixture(scope="module", autouse=True)
def one_choosing():
    """Compile only the program that chooses tokens in every way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(True, True, likeliest),))
        yield


@pytest.fixture(scope="module")
def dreamer():
    """Two devices share seven experts."""
    engine = served("dreamer", FEW_PAGES, mesh=mesh_of(4, 2))
    yield engine
    engine.close(0)
    assert not [thread for thread in threading.enumerate() if thread.name == "served-engine" and thread.is_alive()]


@pytest.mark.slow
def test_requests_get_what_they_get_alone(dreamer, monkeypatch):
    """Of all samplers, depths and lengths, with joins, leaves, cancellation and pages that are short; and nothing is
    compiled for them once the engine is ready."""
    rng, again = np.random.default_rng(0), begun_anew(dreamer, monkeypatch)
    programs = dreamer._programs.chunk, dreamer._programs.join, dreamer._programs.tick
    before, shards = [its._cache_size() for its in programs], set()
    begins = dreamer._scheduler._begins
    monkeypatch.setattr(dreamer._scheduler, "_begins", lambda job, shard: (shards.add(shard), begins(job, shard))[1])
    taken = check("dreamer", dreamer, [drawn_request(rng, "dreamer", few=True) for _ in range(24)], rng)
    assert [its._cache_size() for its in programs] == before
    assert shards == set(range(8)) and {its.finish for its in taken} == {"length", "stop", "cancelled"}
    print(f"{len(again)} began anew, {dreamer.view().shared_tokens} tokens of prompts were shared")


@pytest.mark.slow
def test_prompts_come_with_their_logarithms(dreamer):
    """One of each device, at once."""
    rng, taken = np.random.default_rng(2), [Taken() for _ in range(8)]
    prompts = [tuple(rng.integers(0, 23, length).tolist()) for length in range(2, 10)]
    requests = [Request(prompt, 0, logprobs=1, echo=True) for prompt in prompts]
    dreamer.submit_all(list(zip(requests, taken, strict=True)))
    for prompt, its in zip(prompts, taken, strict=True):
        found = [(token.id, token.logprob, token.likeliest) for token in its.wait().prompt[1:]]
        agree(found, logarithms("dreamer", prompt)[:-1], 1)


def test_devices_have_their_share(dreamer):
    """Of rows and places, which are rounded up, of pages, of experts (seven and one that is none), and everything else
    whole."""
    assert (dreamer.options.rows, dreamer.options.places) == (16, 32)
    assert [(group.at_once, group.rows) for group in dreamer._groups] == [(2, 32), (2, 16)]
    assert dreamer.view().pages == 8 * 16
    for pages in jax.tree.leaves(dreamer._pool):
        assert pages.addressable_shards[0].data.shape[1] == 16 and len(pages.addressable_shards) == 8
    layer = dreamer.model.params["layer"]
    gate_up = layer["expert_attention"]["gate_up"].matrices
    assert gate_up.shape[0] == 8 and gate_up.addressable_shards[0].data.shape[0] == 4
    head = dreamer.model.params["head"]
    assert head.addressable_shards[0].data.shape == head.shape


def test_devices_that_exchange_rows_agree_and_others_do_not():
    """One row of eight devices wants something: of two that share experts both hear of it. A loop ends where its group
    has done: after the largest number of its devices."""
    model, sharding = shard(model_of("dreamer"), mesh_of(4, 2), apart=True)
    specs = sharding.model, sharding.rows

    def rounds(model, wanted):
        return jnp.stack([model.anywhere(wanted > 4), model.largest(wanted[0])])[None]

    wanted = np.array([1, 2, 3, 7, 0, 0, 9, 3], np.int32)
    found = np.asarray(jitted(rounds, sharding, 0, specs, sharding.rows)(model, wanted))
    assert found[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1] and found[:, 1].tolist() == [2, 2, 7, 7, 0, 0, 9, 9]
    whole, sharding = shard(model_of("dreamer"), mesh_of(8, 1), apart=True)  # nothing is exchanged
    found = np.asarray(jitted(rounds, sharding, 0, (sharding.model, sharding.rows), sharding.rows)(whole, wanted))
    assert found[:, 1].tolist() == wanted.tolist() and sharding.rows == PartitionSpec(("data", "expert"))


@pytest.mark.slow  # a hundred requests of each model, all of which are computed alone too
@pytest.mark.parametrize(("family", "expert"), [("dreamer", 4), ("huginn", 2), ("huginn", 1)])
def test_many_requests_get_what_they_get_alone(family, expert, monkeypatch):
    """Four times twenty-five, each time beside what has stayed of those before. Huginn's neurons are divided in the
    prelude and the coda, too."""
    samplers = [Static(), Adaptive(), Lossless(1), *([FORCING] if family == "huginn" else [])]
    engine, rng = served(family, FEW_PAGES, samplers, mesh_of(8 // expert, expert)), np.random.default_rng(1)
    again = begun_anew(engine, monkeypatch)
    for _ in range(4):
        check(family, engine, [drawn_request(rng, family) for _ in range(25)], rng)
    print(f"{len(again)} began anew, {engine.view().shared_tokens} tokens of prompts were shared")
    assert engine.view().shared_tokens
    engine.close(0)
