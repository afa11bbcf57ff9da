"""`dreamer train` as a person runs it, on a tiny model: repeatable, resumable, and clear about what is wrong."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.errors import RESTART_EXIT_CODE, UserError
from dreamer_jax.runs.metrics import read_metrics
from dreamer_jax.runs.models import load_run
from dreamer_jax.training.stability import SkipCounter
from tests.end_to_end.cases import TINY, programs_kept

CONFIG = (
    TINY.format(variant="DR+DA", depth=2)
    + """\
training:
  steps: 12
  batch_size: 4
  learning_rate: 1e-2
  warmup_steps: 2
  remat: none
  log_every: 2
checkpoint:
  every: 3
evaluation:
  every: 6
  harder: 3
"""
)


@pytest.fixture(scope="module", autouse=True)
def compile_each_program_once(tmp_path_factory):
    """Most of these runs have the same programs, and compiling is most of their time."""
    with programs_kept(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def without_ending(monkeypatch):
    """Nothing is decoded and drawn at the end of a run, where that isn't what a test is about."""
    end_quickly(monkeypatch)


def end_quickly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dreamer_jax.inference.answering.answer", lambda config, state, data, records: [""] * len(records))
    patch.setattr("dreamer_jax.training.loop.draw_figures", lambda directory: [])


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory) -> Path:
    """An undisturbed run of 12 steps; tests leave it as it is."""
    directory = tmp_path_factory.mktemp("runs") / "first"
    assert main(["train", config, "--run.dir", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def interrupted(config, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run stopped after 6 steps, its metrics then spoiled by steps that no checkpoint holds, and resumed to 12.

    Also returns what jax compiled while it was resumed.
    """
    directory = tmp_path_factory.mktemp("runs") / "second"
    words = ["train", config, f"--run.dir={directory}", "--training.steps"]
    with pytest.MonkeyPatch.context() as patch:
        end_quickly(patch)
        assert main([*words, "6"]) == 0
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 99.0}\n{"step": 8, "lo')
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
            end_quickly(patch)
            assert main([*words, "12"]) == 0
    finally:
        logging.getLogger("jax").removeHandler(handler)
    return directory, messages


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def without_times(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_metrics(directory)]


def error_of(capsys) -> str:
    """The one message on stderr."""
    text = capsys.readouterr().err
    assert text.startswith("dreamer: error: ") and "Traceback" not in text
    return text


def test_what_a_run_leaves(finished):
    records = read_metrics(finished)
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 4, 6, 8, 10, 12]
    assert [record["tokens"] for record in trained] == [record["step"] * 4 * 64 for record in trained]
    assert trained[0]["loss"] == pytest.approx(np.log(259), rel=0.1)
    assert trained[-1]["loss"] < 0.9 * trained[0]["loss"]
    routers = ("expert_attention", "sequence_attention", "depth_attention")
    names = {f"experts/{router}/{kind}" for router in routers for kind in ("used", "gini", "max_over_median")}
    names |= {f"bias/{router}/{kind}" for router in routers for kind in ("min", "max")}
    assert names | {"learning_rate", "gradient_norm", "time/tokens_per_second"} <= set(trained[0])
    evaluated = [record for record in records if "heldout/loss" in record]
    assert [record["step"] for record in evaluated] == [6, 12]
    assert {"heldout/perplexity", "heldout/exact_match", "harder/exact_match"} <= set(evaluated[0])

    summary = json.loads((finished / "summary.json").read_text())
    assert summary == {**trained[-1], **evaluated[-1]}
    assert {"figures/loss.png", "figures/accuracy.png", "config.yaml"} <= set(files(finished))
    assert sorted(int(p.name) for p in (finished / "checkpoints").iterdir() if p.name.isdigit()) == [6, 9, 12]


def test_a_resumed_run_is_the_undisturbed_one(finished, interrupted):
    """Metrics and every weight, bit for bit: the two halves start from the same seed, as two whole runs would."""
    directory, _ = interrupted
    assert without_times(directory) == without_times(finished)
    one, other = load_run(finished), load_run(directory)
    assert one.step == other.step == 12 and one.meta == other.meta
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    jax.tree.map(np.testing.assert_array_equal, one.model_state, other.model_state)


def test_the_step_compiles_once(interrupted):
    compiled = [message for message in interrupted[1] if message.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 1


def test_a_complete_run_says_so(config, finished, capsys):
    before = files(finished)
    assert main(["train", config, "--run.dir", str(finished)]) == 0
    output = capsys.readouterr().out
    assert "the run is complete: 12 steps of 12" in output and "compiling" not in output
    assert "one of 8 devices is used; --mesh.data 8 takes all of them" in output
    after = files(finished)
    assert set(after) == set(before)
    assert after["metrics.jsonl"] == before["metrics.jsonl"] and after["summary.json"] == before["summary.json"]


@pytest.mark.parametrize("change", [["--model.depth=3", "depth"], ["--training.learning_rate=3e-3", "learning_rate"]])
def test_a_complete_run_takes_no_change_that_no_step_would_see(config, finished, capsys, change):
    """Its configuration would say of steps what they never saw."""
    before = files(finished)
    setting, name = change
    assert main(["train", config, "--run.dir", str(finished), setting, f"--checkpoint.allow={name}"]) == 2
    assert "no step would be trained with" in error_of(capsys)
    assert files(finished) == before


def test_another_configuration_changes_nothing(config, finished, capsys):
    before = files(finished)
    words = ["train", config, "--run.dir", str(finished), "--training.learning_rate=2e-2", "--model.num_experts", "8"]
    assert main([*words, "--training.steps=20"]) == 2
    error = error_of(capsys)
    assert "model.num_experts: 6 -> 8" in error and "training.learning_rate: 0.01 -> 0.02" in error
    assert "training.steps" not in error and "--run.dir" in error
    assert files(finished) == before


def test_load_run(finished, tmp_path):
    latest, earlier = load_run(finished), load_run(finished / "checkpoints" / "6")
    assert (latest.step, earlier.step, load_run(finished, step=9).step) == (12, 6, 9)
    assert latest.config.model.num_experts == 6
    assert latest.params["head"].shape == (259, 16) and latest.params["head"].dtype == np.float32
    assert not np.array_equal(latest.params["head"], earlier.params["head"])
    with pytest.raises(UserError, match="is not a run directory"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint of step 7; it has 6, 9, 12"):
        load_run(finished, step=7)
    (tmp_path / "config.yaml").write_bytes((finished / "config.yaml").read_bytes())
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_diverging_run_stops(config, tmp_path, capsys):
    """After going back once; what isn't finite is never recorded or saved."""
    directory = tmp_path / "run"
    words = ["--training.learning_rate", "1e30", "--checkpoint.every", "2", "--safety.skipped_in_a_row", "3"]
    assert main(["train", config, "--run.dir", str(directory), *words, "--safety.rollbacks=1"]) == 2
    output = capsys.readouterr()
    assert "going back to step 0, which goes on with batch 4 of the data" in output.out
    assert "up to step 4, had no finite loss" in output.err and "training has diverged" in output.err
    assert "--training.learning_rate" in output.err and "Traceback" not in output.err
    with pytest.raises(UserError, match="no checkpoint"):
        load_run(directory)
    assert all(np.isfinite(list(record.values())).all() for record in read_metrics(directory))


def test_asked_to_stop(config, finished, tmp_path, monkeypatch, capsys, without_ending):
    """SIGTERM in step 7 ends that step, saves and asks for a restart, which then is the undisturbed run."""
    directory = tmp_path / "run"
    add = SkipCounter.add

    def stopping(self: SkipCounter, step: int, skipped) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, step, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(SkipCounter, "add", stopping)
        assert main(["train", config, "--run.dir", str(directory)]) == RESTART_EXIT_CODE
    assert "asked to stop: saved step 7" in capsys.readouterr().out
    assert load_run(directory).step == 7
    assert main(["train", config, "--run.dir", str(directory)]) == 0
    assert "resumed from checkpoint 7" in capsys.readouterr().out
    assert without_times(directory) == without_times(finished)


@pytest.mark.slow  # trains twice, in two depths
def test_changes_that_are_allowed_by_name(config, tmp_path, capsys, without_ending):
    """Another learning rate and another depth, each asked for by name; anything else is still refused."""
    directory = tmp_path / "run"
    words = ["train", config, "--run.dir", str(directory), "--evaluation.harder=0"]
    assert main([*words, "--training.steps=3"]) == 0
    assert main([*words, "--training.learning_rate=3e-3"]) == 2
    assert "add --checkpoint.allow learning_rate to change that" in error_of(capsys)
    slower = [*words, "--training.learning_rate=3e-3", "--checkpoint.allow"]
    assert main([*slower, "learning_rate", "--model.num_experts=8"]) == 2
    assert "model.num_experts: 6 -> 8" in error_of(capsys)
    deeper = ["--model.depth=3", "--training.steps=6"]
    assert main([*slower, "learning_rate", *deeper]) == 2
    assert "model.depth: 2 -> 3" in error_of(capsys)
    assert main([*slower, "learning_rate,depth", *deeper]) == 0
    assert [r["learning_rate"] for r in read_metrics(directory) if "loss" in r] == pytest.approx(
        [5e-3, 1e-2, 1e-2, 3e-3, 3e-3]
    )
    assert "depth 2 of checkpoint 3 becomes 3" in capsys.readouterr().out
    before, after = load_run(directory, step=3), load_run(directory)
    assert (before.config.model.depth, after.config.model.depth) == (2, 3)
    biases = [model.model_state["balancing"]["sequence_attention"] for model in (before, after)]
    assert [bias.shape for bias in biases] == [(2,), (3,)]
    assert (before.step, after.step) == (3, 6)


@pytest.mark.slow
def test_layers_are_stacked(config, tmp_path, capsys):
    """A model of two layers goes on with three; five, or one, it can't become."""
    words = ["--run.dir", str(tmp_path / "run"), "--model.variant=LA"]
    assert main(["train", config, *words, "--model.depth=2", "--training.steps=2"]) == 0
    for depth in (5, 1):
        assert main(["train", config, *words, f"--model.depth={depth}", "--checkpoint.allow=depth"]) == 2
        assert f"They can become up to 4, the middle ones repeated, but not {depth}" in error_of(capsys)
    assert main(["train", config, *words, "--model.depth=3", "--training.steps=3", "--checkpoint.allow=depth"]) == 0
    assert "depth 2 of checkpoint 2 becomes 3" in capsys.readouterr().out
    assert load_run(tmp_path / "run").params["layers"]["sequence_norm"]["scale"].shape[0] == 3


@pytest.mark.slow
def test_a_log_on_a_full_disk_takes_nothing_from_a_run(config, tmp_path):
    words = [sys.executable, "-m", "dreamer_jax", "train", config, "--training.steps=2", "--evaluation.harder=0"]
    with open("/dev/full", "w") as full:
        words += ["--run.dir", str(tmp_path / "run")]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.count("dreamer: the log can't be written (No space left on device); the run goes on\n") == 1
    assert [record["step"] for record in read_metrics(tmp_path / "run")][-1] == 2


def test_a_run_without_its_configuration_is_still_the_same_run(config, finished, tmp_path, capsys):
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    (directory / "config.yaml").unlink()
    assert main(["train", config, "--run.dir", str(directory), "--training.learning_rate=1e-3"]) == 2
    assert "training.learning_rate: 0.01 -> 0.001" in error_of(capsys)
    assert not (directory / "config.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.dir", "FILE/run"], "run.dir: can't write to"),
        (["--run.dir", "FILE"], "run.dir: can't write to"),
        (["--mesh.data=16", "--training.batch_size=16"], "mesh.data: 16 devices asked for (data 16), but there are 8"),
        (["--model.vocab_size", "258"], "model.vocab_size: 258 is too small"),
        (["--data.source=jsonl", "--data.path=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_mistakes(words, message, config, tmp_path, capsys):
    (tmp_path / "file").write_text("a file")
    words = [word.replace("FILE", str(tmp_path / "file")) for word in words]
    directory = [] if "--run.dir" in words else ["--run.dir", str(tmp_path / "run")]
    assert main(["train", config, *directory, *words]) == 2
    assert message in error_of(capsys)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_jsonl(config, tmp_path, capsys):
    """A file of one's own with the byte tokenizer; a change of it is noticed when the run goes on."""
    path, directory = tmp_path / "sums.jsonl", tmp_path / "run"
    records = [{"problem": f"{a}+{b}=", "result": str(a + b)} for a in range(12) for b in range(12)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["train", config, "--run.dir", str(directory), "--evaluation.harder=0", "--data.source", "jsonl"]
    words += ["--data.path", str(path), "--data.prompt", "{problem}", "--data.completion", "{result}"]
    assert main([*words, "--training.steps", "6"]) == 0
    output = capsys.readouterr().out
    assert "138 records to train on, 6 held out" in output and "held-out examples" in output
    trained = [record["loss"] for record in read_metrics(directory) if "loss" in record]
    assert trained[-1] < 0.95 * trained[0]

    path.write_text(
        "".join(json.dumps(record) + "\n" for record in [*records[:-1], {"problem": "1+1=", "result": "3"}])
    )
    before = files(directory)
    assert main([*words, "--training.steps", "12"]) == 2
    error = error_of(capsys)
    assert "changed since checkpoint 6" in error and "--run.dir" in error
    assert files(directory) == before
