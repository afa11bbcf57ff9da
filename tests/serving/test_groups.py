"""Which programs a server compiles for the samplers that it offers, and which of them takes a request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dreamer_jax.cli.serve import engine_for
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Adaptive, DiffusionForcing, Lossless
from dreamer_jax.serving import engine as served_engine
from dreamer_jax.serving.contract import Request
from dreamer_jax.serving.groups import group_of, programs_of
from tests.inference.test_samplers import model_of
from tests.serving.cases import Taken, wide


@pytest.fixture(autouse=True)
def float64():
    with wide():
        yield


@pytest.fixture
def offered(monkeypatch):
    """The samplers of a server by name, as `dreamer serve --offer` has made them."""

    class Engine(served_engine.ServedEngine):
        def _warm_up(self) -> None:
            pass

    monkeypatch.setattr(served_engine, "ServedEngine", Engine)

    def offer(*samplers):
        engine = engine_for(SimpleNamespace(folded=lambda depth: model_of("huginn")), 2, 32, 4, None, samplers)
        engine.close(0)
        return engine

    return offer


def test_a_name_alone_stands_for_what_is_offered_under_it(offered):
    """And a lossless sampler of other settings takes no program beside the one that takes all of them."""
    engine = offered(Adaptive(threshold=0.2), Lossless(2))
    assert engine.samplers["adaptive"] == Adaptive(threshold=0.2) and engine.samplers["lossless"] == Lossless(2)
    assert [program.name for program in engine.programs] == ["one-by-one", "lossless"]
    assert next(iter(engine.samplers)) == "static"
    with pytest.raises(UserError, match=r"has compiled .*lossless-guess_depth-2"):
        engine.submit(Request((1,), 2, sampler=Adaptive("kl")), Taken())


def test_a_refusal_says_with_which_settings_samplers_are_there():
    model, forcing = model_of("huginn"), DiffusionForcing(2, wavefront=8)
    served = programs_of(model, [forcing])
    with pytest.raises(
        UserError, match=r"threshold-0.1: this server has compiled diffusion-forcing-.*-wavefront-8; start"
    ):
        group_of(served, model, DiffusionForcing(threshold=0.1), None, [forcing.label])
    assert group_of(served, model, DiffusionForcing(2, wavefront=8, threshold=0.1), None, [])[:2] == (0, 4)
