"""`dreamer bench samplers`: what is counted of each sampler, on a model whose tokens are known beforehand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from dreamer_jax.benchmarks import samplers
from dreamer_jax.cli.main import main
from dreamer_jax.inference import Adaptive, Engine, Lossless, Speculative, Static, fold
from tests.families.test_ouro import TINY, drawn_params

COMPARED = [(Static(), 3), (Static(), 1), (Adaptive("argmax-stability"), 3), (Speculative(2), 3)]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run of three depths, and a file of two prompts."""
    model = SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(prompt="{question}"), model=TINY),
        params=drawn_params(TINY),
        model_state={},
        encode=lambda text: [1, *(ord(letter) % 23 for letter in text)],
    )
    monkeypatch.setattr("dreamer_jax.model.load", lambda path: model)
    monkeypatch.setattr(samplers, "settings_for", lambda depth: COMPARED)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "another")))
    return str(path)


def test_counts_are_those_of_the_engine(run, capsys):
    words = ["bench", "samplers", "runs/x", "--data", run, "--tokens", "6", "--rounds", "1"]
    assert main([*words, "--batch", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sides = found["batches"]["2"]
    full, fewer, adaptive, speculative = sides.values()
    assert list(sides)[1] == "static, depth 1"
    assert full["steps"] == full["work"] == 3 and full["agreement"] == 1 and full["acceptance"] is None
    assert fewer["steps"] == 1 and fewer["agreement"] < 1
    assert 1 <= adaptive["steps"] <= 3  # it needs six checks, so it takes all
    assert adaptive["agreement"] == 1
    assert speculative["agreement"] == 1 and 0 <= speculative["acceptance"] <= 1
    assert all(side["tokens_per_second"] > 0 for side in sides.values()) and found["refused"] == {}
    model = fold(TINY, drawn_params(TINY), {})
    rows = Engine(model, Speculative(2)).generate([[1, *(ord(x) % 23 for x in text)] for text in ("one", "another")], 6)
    assert speculative["steps"] == sum(row.steps for row in rows) / 10
    assert main([*words, "--batch", "1"]) == 0
    table = capsys.readouterr().out
    assert "agreement" in table and "speculative-lookahead-2" in table


def test_a_sampler_that_a_model_refuses_is_named(run, capsys, monkeypatch):
    monkeypatch.setattr(samplers, "settings_for", lambda depth: [(Static(), depth), (Lossless(7), depth)])
    assert main(["bench", "samplers", "x", "--data", run, "--tokens", "2", "--rounds", "1", "--batch", "1"]) == 0
    assert "less than the depth of the model" in capsys.readouterr().out


def test_mistakes_are_explained(run, capsys):
    assert main(["bench", "samplers", "x", "--data", "missing.jsonl"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["bench", "samplers", "x", "--data", run, "--batch", "9"]) == 2
    assert "2 prompts are too few for a batch of 9" in capsys.readouterr().err


def test_what_is_compared(monkeypatch):
    """Full depth first; parts of it that are fewer depths; every criterion; every sampler."""
    every = list(samplers.settings_for(8))
    assert every[0] == (Static(), 8)
    assert [depth for sampler, depth in every if sampler == Static()] == [8, 1, 2, 4]
    names = {"static", "adaptive", "speculative", "lossless", "diffusion-forcing"}
    assert {sampler.name for sampler, _ in every} == names
    assert [depth for sampler, depth in samplers.settings_for(2) if sampler == Static()] == [2, 1]
