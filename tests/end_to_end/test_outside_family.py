"""A family from outside of the package (tests/families/toy.py) is a full citizen: nothing else knows of it.

It trains, goes on after a kill, is counted twice, matched, planned, decodes as it computes, and is analysed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.budget import program
from dreamer_jax.cli.main import main
from dreamer_jax.config.models import VARIABLE
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.inference import Engine, fold
from dreamer_jax.runs.metrics import read_metrics
from dreamer_jax.runs.models import load_run
from tests.analysis.cases import draw_without_files
from tests.families.cases import logits_in_flight
from tests.families.toy import ToyConfig

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "tests" / "families" / "toy.py"
STEPS = 40
ROW = 10
"""Tokens of a row that a whole pass computes."""
SETTINGS = f"""\
model:
  family: toy
  depth: 3
data:
  task: boolean
  difficulty: 2
  loss: answer
  sequence_length: 64
  heldout_records: 6
training:
  steps: {STEPS}
  batch_size: 8
  learning_rate: 3e-3
  warmup_steps: 5
  remat: none
  log_every: 1
checkpoint:
  every: 5
evaluation:
  every: 50
"""


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    """Training in a process of its own, as a user would start it."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]  # one device
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": " ".join(flags),
        VARIABLE: "",
    }
    command = [sys.executable, "-m", "dreamer_jax", "train", "toy.yaml", "--family-module", str(MODULE)]
    return subprocess.Popen(
        [*command, "--run.dir", name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with an undisturbed run, `whole`."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.yaml").write_text(SETTINGS)
    process = start(folder, "whole")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return folder


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """The module, for what is called in this process."""
    monkeypatch.setenv(VARIABLE, str(MODULE))


TOY = ("--family-module", str(MODULE))


def records(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_metrics(directory)]


@pytest.mark.slow  # a family of the package goes on after a kill in tests/end_to_end/test_kills.py
def test_trains_and_goes_on_after_a_kill(trained):
    """What its loss says is logged; a killed run, started again, records what the undisturbed one did."""
    whole = records(trained / "whole")
    losses = [record["loss"] for record in whole if "loss" in record]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert all(1 <= record["halting_depth"] <= 3 for record in whole if "loss" in record)
    process = start(trained, "killed")
    assert process.stdout is not None
    saved = trained / "killed" / "checkpoints" / "5" / "manifest-0-of-1.json"  # written last, in the background
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1].partition("/")[0]) >= 8 and saved.exists():
            process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    again = start(trained, "killed")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "resumed from checkpoint" in output, output
    assert records(trained / "killed") == whole
    configuration = (trained / "whole" / "config.yaml").read_text()
    assert "family: toy" in configuration and "toy.py" not in configuration  # a run never names code to import


def test_a_run_is_refused_without_its_module(trained, monkeypatch, capsys):
    """With the way out."""
    monkeypatch.setenv(VARIABLE, "")
    assert main(["generate", str(trained / "whole"), "--prompt", "!T="]) == 2
    assert "--family-module" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{}, {"depth": 5, "heads": 1, "gate_size": 24}])
def test_both_counters_agree(changes):
    """Parameters and matrix products, by arithmetic and in the lowered program."""
    config = ToyConfig(**changes)
    found, expected = program.count(config, 24), program.expected(config, 24)
    assert found.parameters == expected.parameters
    assert found.flops_per_token == pytest.approx(expected.flops_per_token, rel=1e-6)


@pytest.mark.slow
def test_commands_that_count(trained, capsys):
    """budget, match and plan --roofline, from the command line."""
    path = str(trained / "toy.yaml")
    assert main(["budget", path, *TOY, "--json"]) == 0
    budget = json.loads(capsys.readouterr().out)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(initialise(build(ToyConfig(depth=3)), jax.random.key(0))[0]))
    assert budget["parameters"]["total"] == parameters
    assert budget["generation_bytes"]["attention cache"] == 3 * 1024 * 2 * 2 * 16 * 2

    assert main(["match", path, *TOY, "--params", "40000", "--granularity", "1", "--json"]) == 0
    match = json.loads(capsys.readouterr().out)
    assert abs(match["gaps_percent"]["params"]) < 0.2 and match["gate_size"] > 32

    assert main(["plan", path, *TOY, "--topology", "v5e:2x2", "--roofline", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = {term["name"] for term in plan["roofline"]["terms"]}
    assert {"sequence attention: scores", "gate", "adapter", "head and loss", "optimizer"} <= names
    assert 0 < plan["roofline"]["mfu"] < 1


@functools.cache
def whole_pass(config: ToyConfig) -> Any:
    """(params, model state, tokens) -> logits [B, S, V]."""
    family = build(config)

    def logits(params, model_state, tokens):
        passed = forward(family, params, model_state, {"tokens": tokens})
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return family.logits(params, hidden)

    return jax.jit(logits)


def logits_of_rows(run: Any, tokens: Any) -> np.ndarray:
    return np.asarray(whole_pass(run.config.model)(run.params, run.model_state, tokens))


@jax.jit
def in_a_chunk(model: Any, tokens: Any, places: Any, slots: Any) -> Any:
    """Logits of positions that go through all depths together, and the slots with them."""
    flight, slots = model.enter(tokens, places, slots)
    for l in range(model.total_depth):
        flight, slots = model.step(flight, places, l, slots)
    found, slots = model.leave(flight, places, slots)
    return model.logits(found), slots


def test_decodes_what_it_computes(trained):
    """Through the memories, in chunks, one by one and as a wavefront of depths: the logits of the pass over the row."""
    run = load_run(trained / "whole")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, ROW)), jnp.int32)
    expected = logits_of_rows(run, tokens)
    model = fold(run.config.model, run.params, run.model_state)
    slots = model.empty_slots(2, 12)
    for start_, end in ((0, 4), (4, 5), (5, 6)):
        places = jnp.broadcast_to(jnp.arange(start_, end), (2, end - start_))
        found, slots = in_a_chunk(model, tokens[:, start_:end], places, slots)
        np.testing.assert_allclose(found, expected[:, start_:end], atol=1e-5)
    places = jnp.broadcast_to(jnp.arange(6, ROW), (2, ROW - 6))
    np.testing.assert_allclose(logits_in_flight(model, tokens[:, 6:], places, slots), expected[:, 6:], atol=1e-5)


def test_generates_greedily_what_the_full_forward_says(trained):
    """Every token of the continuation is the likeliest one after the row so far."""
    run = load_run(trained / "whole")
    engine = Engine.of(run)
    prompts = [[1, 50, 60], [2, 70, 80, 90, 91]]
    rows = [prompt + row.tokens for prompt, row in zip(prompts, engine.generate(prompts, 5), strict=True)]
    padded = jnp.asarray([row + [0] * (ROW - len(row)) for row in rows], jnp.int32)  # what comes later isn't seen
    likeliest = logits_of_rows(run, padded).argmax(-1)
    for prompt, row, its in zip(prompts, rows, likeliest, strict=True):
        assert row[len(prompt) :] == its[len(prompt) - 1 : len(row) - 1].tolist() and len(row) == len(prompt) + 5


def test_is_analysed(trained, capsys, monkeypatch):
    """Stream and lens as for any model, and what its own step saw: shares that add up to one."""
    draw_without_files(monkeypatch)
    assert main(["analyze", str(trained / "whole"), *TOY, "--out", str(trained / "analysis"), "--sequences", "40"]) == 0
    summary = json.loads((trained / "analysis" / "analysis.json").read_text())
    assert sum(summary["observed"]["halted"]) == pytest.approx(1, abs=1e-4)
    assert len(summary["residual"]["norm"]) == len(summary["lens"]["accuracy"]) == 3
    names = {path.stem for path in (trained / "analysis" / "figures").iterdir()}
    assert {"lens", "residual"} < names
    assert (trained / "analysis" / "report.html").read_text(encoding="utf-8").count("<section>") == len(names)
    assert "experts" not in summary
    assert summary["model"] == {"variant": "toy", "depth": 3, "predicts": "next token"}
