"""The real train step, compiled for TPU topologies without a TPU: what `dreamer plan` reads from it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

pytest.importorskip("libtpu", reason="extra tpu")

from dreamer_jax.cli.main import main
from dreamer_jax.config import Config, load_config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.planning.compiling import Compiled, compile_step
from dreamer_jax.planning.topology import parse_topology

pytestmark = pytest.mark.aot
PAPER = "dr_da_32"
SMALL = {
    "model.depth": "4",
    "model.hidden_size": "256",
    "model.vocab_size": "8192",
    "model.sa_heads": "4",
    "model.sa_kv_heads": "2",
    "model.num_experts": "67",
    "model.expert_size": "120",
    "data.sequence_length": "512",
}
"""Small enough to compile in half a minute, with a number of experts that divides nothing."""


def small(mesh: MeshConfig, changes: dict[str, str] | None = None) -> Config:
    """One row of 512 tokens a chip."""
    options = [word for key, value in (SMALL | (changes or {})).items() for word in (f"--{key}", value)]
    options += ["--training.batch_size", str(mesh.size)]
    return dataclasses.replace(load_config(PAPER, options).config, mesh=mesh)


@pytest.fixture(scope="module", params=["v5e:16x16", "v4:4x4x4", "v5p:4x4x4"])
def compiled(request) -> tuple[Compiled, MeshConfig]:
    """The step on the torus as it is."""
    topology = parse_topology(request.param)
    mesh = MeshConfig(data=topology.shape)
    return compile_step(small(mesh), topology), mesh


def test_it_compiles_and_its_text_can_be_read(compiled):
    its, _ = compiled
    assert its.fits and its.problem == "" and its.collectives
    assert 0 < its.memory["temp"] <= its.memory["reported_temp"] and its.total < 95e9
    assert its.memory["aliased"] > 0.9 * its.memory["outputs"]  # the state is donated
    assert 0.3 < its.named_bytes / its.memory["temp"] < 1.5
    assert any("/" in buffer.name for buffer in its.buffers)  # where in the traced program it is made


def test_weights_travel_once_and_nothing_travels_in_a_loop(compiled):
    its, mesh = compiled
    assert [c for c in its.collectives if c.loops] == []
    assert its.weight_all_reduces == () and its.weight_copies == ()
    axes = {f"data{i}" for i in range(len(mesh.data))}
    wide = Counter((c.kind, axis) for c in its.collectives for axis in c.axes if c.bytes >= 1 << 14)
    for kind in ("all-gather", "reduce-scatter"):
        assert {axis for k, axis in wide if k == kind} == axes
    heads = [c for c in its.collectives if c.arrays[0] in ("bf16[8192,256]", "f32[8192,256]")]
    # Embedding and head: each gathered whole once, and its gradient scattered once.
    assert Counter(c.kind for c in heads) == {"all-gather": 2, "reduce-scatter": 2}


@pytest.mark.parametrize(("exchange", "kind"), [("gather", "reduce-scatter"), ("ragged", "ragged-all-to-all")])
def test_expert_parallelism_is_all_that_travels_in_a_loop(exchange, kind):
    topology = parse_topology("v5p:2x2x2")
    mesh = MeshConfig(data=(2, 2), expert=2, exchange=exchange)
    its = compile_step(small(mesh), topology)
    inside = [c for c in its.collectives or () if c.loops]
    assert inside and {c.axes for c in inside} == {("expert",)}
    assert kind in {c.kind for c in inside}
    assert its.weight_all_reduces == ()


@pytest.mark.slow
def test_memory_of_depth_attention():
    """At the paper's sizes, DR+DA's temporaries are those of DR and little more."""
    topology, mesh = parse_topology("v5p:4x4x4"), MeshConfig(data=(4, 4, 2), expert=2)
    temp = {}
    for name in ("dr_da_32", "dr_32"):
        config = load_config(PAPER.replace("dr_da_32", name), ["--training.gradient_depths", "1"]).config
        temp[name] = compile_step(dataclasses.replace(config, mesh=mesh), topology).memory["temp"]
    assert temp["dr_da_32"] < 1.1 * temp["dr_32"]


def test_time_to_compile_by_depth():
    """The depth scan compiles one layer, whatever the depth; of few depths some loops fall away."""
    topology, mesh = parse_topology("v5p:2x2x1"), MeshConfig(data=(2, 2))
    seconds = {
        depth: compile_step(small(mesh, {"model.depth": depth}), topology).seconds["compiling"]
        for depth in ("16", "128")
    }
    assert seconds["128"] < 1.25 * seconds["16"]


def test_the_command(capsys):
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    assert main(["plan", PAPER, *words, "--topology", "v5e:2x2", "--training.batch_size", "4", "--json"]) == 0
    its = json.loads(capsys.readouterr().out)
    assert its["compiled"]["fits"] and its["roofline"]["compiled"]
    assert its["mesh"] == {"slices": 1, "data": [2, 2], "expert": 1}
    assert its["compiled"]["total_bytes"] < 16e9
