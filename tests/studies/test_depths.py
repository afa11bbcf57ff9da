"""`dreamer depth`: one program for all depths, what it measures and keeps, its page, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.run_data import data_of
from dreamer_jax.cli.main import main
from dreamer_jax.data import open_data
from dreamer_jax.errors import UserError
from dreamer_jax.families import build, forward
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.models import load_run
from dreamer_jax.studies import depth_report, depths, expert_use
from dreamer_jax.studies.depth_report import all_depths, even, highlights, needed_by, thinned
from dreamer_jax.studies.depths import Kept, Progress, usual_depths
from dreamer_jax.studies.difficulty import accuracy, difficulties
from dreamer_jax.training.train_step import make_evaluation_step
from tests.analysis.cases import HUGINN, draw_without_files, make_run
from tests.families.cases import TINY_MODELS, drawn_params
from tests.families.puzzle_cases import puzzles
from tests.training.cases import random_batch, tiny_config

PUZZLE = """
model: {family: depth_recurrent, depth: 2, depth_min: 1, max_depth: 4, hidden_size: 16, heads: 2, mlp_size: 20,
  vocab_size: 3}
data: {source: puzzle, sequence_length: 8, heldout_records: 12, puzzle: {task: graph, difficulty: 2, nodes: 8}}
training: {steps: 3, batch_size: 8, warmup_steps: 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """DR+DA of depth 3 on nested expressions, untrained."""
    return make_run(tmp_path_factory.mktemp("runs") / "small", "DR+DA")


@pytest.fixture(scope="module")
def layered(tmp_path_factory) -> Path:
    """LA of as many layers."""
    return make_run(tmp_path_factory.mktemp("runs") / "layered", "LA")


# One program for all depths.


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_depth_at_run_time_gives_what_one_that_is_compiled_in_gives(name):
    model = dataclasses.replace(TINY_MODELS[name], variant="DR+DA") if name == "dreamer" else TINY_MODELS[name]
    family, params = build(model), drawn_params(model)
    model_state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), family.shapes[1])
    batch = random_batch(0) if family.flags.generates else puzzles(model, rows=8, length=12)
    config = dataclasses.replace(tiny_config(), model=model)
    asked = usual_depths(family)
    step = make_evaluation_step(config, make_mesh(config.mesh, jax.devices()[:1]), asked[-1])
    for depth in (asked[0], asked[-1]):

        @jax.jit
        def alone(params, model_state, batch, depth=depth):
            losses, _ = family.evaluate(params, forward(family, params, model_state, batch, depth), batch)
            return jnp.sum(losses * batch["loss_mask"], axis=1)

        found = step(params, model_state, batch, np.int32(depth))
        np.testing.assert_allclose(found["loss"], alone(params, model_state, batch), rtol=2e-5, atol=1e-6)


# The use of experts.


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_experts_are_counted_over_several_batches_of_training(recurrent, tmp_path, monkeypatch, capsys):
    """Against the counts that training's own forward pass of each batch gives, and Gini's definition: half of the mean
    difference of two experts over their mean."""
    folder = make_run(tmp_path / "run", "DR+DA" if recurrent else "LA")
    monkeypatch.setattr(expert_use, "TOKENS", 3 * 8 * 64)
    assert main(["depth", str(folder), "--depths", "3", "--loss-only", "--experts"]) == 0
    printed = capsys.readouterr()
    assert "use of experts: 3 to compute" in printed.err
    model = load_run(folder)
    passes = [forward(model.family, model.params, model.model_state, open_data(model.config).batch_at(step), 3)
              for step in range(3)]  # fmt: skip
    found = json.loads((folder / "depth.json").read_text())["experts"]["found"]["gini"]
    assert set(found) == set(passes[0].counts)
    for router, value in found.items():
        total = np.sum([np.asarray(passed.counts[router], np.float64) for passed in passes], axis=0)
        rows = total.sum(axis=0, keepdims=True) if recurrent else total
        ginis = [np.abs(row[:, None] - row).mean() / 2 / row.mean() for row in rows]
        assert value == pytest.approx(np.mean(ginis), abs=1e-3)
        assert f"the experts of {router}: {value:.3f}" in printed.out
        alone = np.asarray(passes[0].counts[router], np.float64).sum(axis=0)
        assert not np.allclose(alone * 3, total.sum(axis=0))  # a batch by itself has other counts
    monkeypatch.setattr(expert_use, "forward", None)  # nothing is computed twice
    assert expert_use.expert_use(*depths.open_run(folder), print) == found


@pytest.mark.slow
def test_a_model_without_experts_has_none_that_are_used(tmp_path, capsys):
    folder = make_run(tmp_path / "huginn", model=HUGINN)
    assert expert_use.expert_use(*depths.open_run(folder), lambda line: None) == {}
    assert json.loads((folder / "depth.json").read_text())["experts"]["found"] == {"gini": {}}
    assert main(["depth", str(folder), "--depths", "1", "--loss-only", "--experts"]) == 0
    assert "The model has no experts." in capsys.readouterr().out


# The report.


def test_the_whole_command(run, monkeypatch, capsys):
    """What it prints, writes and keeps; and that nothing of it is computed twice."""
    draw_without_files(monkeypatch)
    words = ["depth", str(run), "--depths", "1,6", "--rows", "3", "--instances", "8"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "held-out loss: 3 to compute" in printed.err
    for text in ("*     3", "right answers by difficulty", "a pass of depth 6", "radius", "report.html"):
        assert text in printed.out
    assert {path.name for path in (run / "depth/figures").iterdir()} == {
        f"depth_{name}.{kind}" for name in ("loss", "difficulty", "needed", "within") for kind in ("png", "svg")
    }
    for name in ("make_evaluation_step", "answers", "look", "radii"):
        owner = depths if name == "make_evaluation_step" else depth_report
        monkeypatch.setattr(owner, name, None)
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    check(result, 3, [1, 3, 6])
    page = (run / "depth/report.html").read_text()
    assert all(label in page for label, _ in highlights(result))
    assert main(["depth", str(run), "--depths", "3,6", "--loss-only"]) == 0
    assert f"{result['depths']['6']['loss']:.4f}" in capsys.readouterr().out
    kept = json.loads((run / "depth.json").read_text())
    assert list(kept["depths"]) == ["1", "3", "6"] and list(kept["passes"]["found"]) == ["3", "6"]


@pytest.mark.parametrize("words", [[], ["--loss-only"]])
def test_a_run_that_cannot_be_written_is_said_before_anything_is_computed(run, tmp_path, words, monkeypatch, capsys):
    """There is no option that names another place; and whoever tests as root may write everywhere."""
    shutil.copytree(run, copy := tmp_path / "run", ignore=shutil.ignore_patterns(depths.FILE))
    monkeypatch.setattr(depths.os, "access", lambda path, mode: path != copy)
    monkeypatch.setattr(depths, "evaluate", computed := Mock())
    assert main(["depth", str(copy), *words]) == 2
    assert "this can't be written; copy it first" in capsys.readouterr().err
    computed.assert_not_called()


def check(result: dict[str, Any], trained: int, asked: list[int]) -> None:
    """What holds of every report."""
    assert list(map(int, result["depths"])) == asked and result["trained"] == trained
    for its in result["depths"].values():
        assert its["perplexity"] == pytest.approx(np.exp(its["loss"]), rel=1e-6) and 0 <= its["agreement"] <= 1
    if trained in asked:
        assert result["depths"][str(trained)]["agreement"] == 1
    assert set(map(int, result["passes"])) == {trained, asked[-1]}
    for depth, its in result["passes"].items():
        radius = its["spectral_radius"]
        assert len(its["norm"]) == len(its["needed"]) == int(depth) == radius["depths"][-1]
        for least, mean, greatest in zip(radius["least"], radius["mean"], radius["greatest"], strict=True):
            assert 0 <= least <= mean <= greatest


def test_the_loss_is_that_of_an_evaluation_at_that_depth(run):
    """Held-out loss at the trained depth against the evaluation that training does."""
    model = load_run(run)
    step = make_evaluation_step(model.config, make_mesh(model.config.mesh, jax.devices()[:1]))
    rows = [step(model.params, model.model_state, batch) for batch in open_data(model.config).heldout_batches()]
    sums = {name: sum(float(np.sum(its[name])) for its in rows) for name in ("loss", "targets")}
    found = depths.heldout(run, model, [3], depths.open_run(run)[1], lambda _: None)
    assert found[3]["loss"] == pytest.approx(sums["loss"] / sums["targets"], rel=1e-5)
    kept = json.loads((run / depths.FILE).read_text())
    assert kept["weights"] == model.digest
    kept["depths"]["3"]["loss"] = 9.0
    for weights, loss in ((model.digest, 9.0), ("others", found[3]["loss"])):  # of the same step
        (run / depths.FILE).write_text(json.dumps({**kept, "weights": weights}))
        assert depths.heldout(run, model, [3], depths.open_run(run)[1], lambda _: None)[3]["loss"] == loss


def test_difficulties_of_training_and_as_many_harder_ones_as_there_is_room_for(run):
    config = load_run(run).config
    assert difficulties(config) == [1, 2, 3, 4, 5, 6]  # no more than four beyond
    short = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=40))
    assert difficulties(short) == [1, 2, 3, 4, 5]  # of 6 an instance may have 124 characters, more than two rows
    hardest = dataclasses.replace(config, data=dataclasses.replace(config.data, difficulty=11, task="reachability"))
    assert difficulties(hardest)[-1] == 11  # the task has none harder


def test_accuracy_by_difficulty_counts_new_instances_of_exactly_that(run, tmp_path, monkeypatch):
    """The model is asked about what no run is trained on, of the difficulty that it says."""
    model, seen = load_run(run), {}
    original = open_data

    def opened(config):
        data = original(config)
        seen.setdefault(config.evaluation.harder, []).extend(data.harder_records(99))
        return data

    monkeypatch.setattr("dreamer_jax.analysis.run_data.open_data", opened)
    monkeypatch.setattr("dreamer_jax.studies.difficulty.difficulties", lambda _: [1, 2])
    found = accuracy(model, [1, 2], 4, Kept(tmp_path / "kept.json", 0), lambda _: None)
    assert {d: set(row) for d, row in found.items()} == {1: {1, 2}, 2: {1, 2}}
    assert len(seen[1]) == len(seen[2]) == 4
    assert {record.prompt.count("(") for record in seen[1]} == {1} and all("((" in r.prompt + "((" for r in seen[2])
    assert max(record.prompt.count("(") for record in seen[2]) >= 2


@pytest.mark.slow
def test_the_whole_command_on_puzzles(tmp_path, monkeypatch, capsys):
    draw_without_files(monkeypatch)
    directory = make_puzzle_run(tmp_path)
    assert main(["depth", str(directory), "--json", "--instances", "6"]) == 0
    result = json.loads(capsys.readouterr().out)
    check(result, 2, [1, 2, 3, 4])  # as many as there are embeddings for
    assert list(result["difficulty"]["accuracy"]) == ["1", "2", "3", "4", "5"]


@pytest.mark.slow
def test_the_whole_command_on_layers(layered, monkeypatch, capsys):
    draw_without_files(monkeypatch)
    assert main(["depth", str(layered), "--json", "--instances", "6"]) == 0
    result = json.loads(capsys.readouterr().out)
    check(result, 3, [1, 2, 3])
    assert list(result["passes"]) == ["3"]


def make_puzzle_run(folder: Path) -> Path:
    """A run of that family at step 0."""
    from dreamer_jax.config import load_config
    from dreamer_jax.runs.checkpoints import Checkpoints
    from dreamer_jax.runs.folders import open_run
    from dreamer_jax.training.state import create_state

    (folder / "puzzle.yaml").write_text(PUZZLE + f"run: {{dir: {folder / 'puzzle'}}}\n")
    loaded = load_config(folder / "puzzle.yaml")
    checkpoints = Checkpoints(open_run(loaded).local, loaded.config.checkpoint, {"data": "", "tokenizer": ""})
    checkpoints.save(create_state(loaded.config, make_mesh(loaded.config.mesh)))
    checkpoints.close()
    return folder / "puzzle"


# Parts.


def test_depths_that_are_asked_for_without_being_named(run, layered):
    assert all_depths(load_run(run).family) == list(range(1, 13))
    assert all_depths(load_run(layered).family) == [1, 2, 3]
    deep = build(dataclasses.replace(load_run(run).config.model, depth=20))
    found = all_depths(deep)
    assert len(found) <= 32 and {1, 20, 40, 80} <= set(found) and found == sorted(found)
    eight = build(dataclasses.replace(load_run(run).config.model, depth=8))
    assert all_depths(eight) == list(range(1, 33))
    assert thinned(eight, range(1, 13), 12) == list(range(1, 13))
    assert len(thinned(eight, range(1, 33), 12)) <= 12 and {1, 8, 16, 32} <= set(thinned(eight, range(1, 33), 12))
    assert even(1, 5) == [0] and even(10, 3) == [0, 4, 9] and even(4, 9) == [0, 1, 2, 3]


def test_the_depth_by_which_a_share_of_the_targets_stands():
    assert [needed_by([5, 0, 4, 1], share) for share in (0.5, 0.6, 0.9, 1.0)] == [1, 3, 3, 4]


def test_what_is_halted_at_the_last_depth_has_not_halted_by_itself():
    """A Universal Transformer whose units stay below 1 - epsilon halts everything there; of 8 targets 2 stop before."""
    radius = {"depths": [1, 2, 3], "mean": [0.5] * 3}
    halting = {"needed": [8, 0, 0], "halted": [0, 2, 6, 0], "spectral_radius": radius}
    measured = {"3": {"loss": 1.0, "agreement": 1.0}}
    lines = dict(highlights({"depths": measured, "trained": 3, "passes": {"3": halting}}))
    assert lines["targets that halt before the last depth in a pass of 3"] == "25.0%"


def test_what_is_kept_is_of_one_checkpoint_and_of_the_same_settings(tmp_path):
    file = tmp_path / "depth.json"
    kept = Kept(file, 7)
    kept.part("depths")["10"] = kept.part("depths")["2"] = {"loss": 1.0}
    kept.part("agreement", {"rows": 3})["1"] = 0.5
    kept.write()
    assert list(json.loads(file.read_text())["depths"]) == ["2", "10"]
    assert Kept(file, 7).part("agreement", {"rows": 3}) == {"1": 0.5}
    assert Kept(file, 7).part("agreement", {"rows": 4}) == {}
    assert Kept(file, 8).part("depths") == {}
    assert Kept(file, 7, "of these weights").part("depths") == {}
    (kept := Kept(file, 7, "of these weights")).part("depths")["2"] = {"loss": 1.0}
    kept.write()
    assert Kept(file, 7, "of these weights").part("depths") == Kept(file, 7).part("depths") == {"2": {"loss": 1.0}}
    assert Kept(file, 7, "of others").part("depths") == {}


@pytest.mark.parametrize("found", [3, ["loss"], {}, {"loss": "low"}, {"loss": None}])
def test_what_is_kept_of_a_depth_is_numbers(found, tmp_path):
    file = tmp_path / "depth.json"
    file.write_text(json.dumps({"step": 7, "depths": {"1": found}}))
    with pytest.raises(UserError, match="is damaged: what it has of a depth isn't numbers by name; remove it"):
        Kept(file, 7)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("agreement", "a"),
        ("difficulty", None),
        ("passes", {}),
        ("passes", {"needed": [1], "norm": [1], "residual": [1]}),
    ],
)
def test_what_is_kept_of_the_other_parts_is_what_was_written(name, found, tmp_path):
    file = tmp_path / "depth.json"
    file.write_text(json.dumps({"step": 7, name: {"settings": {}, "found": {"6": found}}}))
    with pytest.raises(UserError, match=f"is damaged: its part {name} has something else; remove it"):
        Kept(file, 7)


def test_the_trained_depth_is_the_checkpoints(run, tmp_path, capsys):
    """Also where the run is about to go on at another one, and nothing is saved yet."""
    shutil.copytree(run, copy := tmp_path / "run", ignore=shutil.ignore_patterns(depths.FILE))
    text = (copy / "config.yaml").read_text()
    assert text.count("\n  depth: 3 ") == 1
    (copy / "config.yaml").write_text(text.replace("\n  depth: 3 ", "\n  depth: 5 "))
    assert main(["depth", str(copy), "--loss-only", "--instances", "4", "--depths", "3,5"]) == 0
    printed = capsys.readouterr().out
    assert "trained at depth 3 (*)" in printed and printed.count("\n*     3") == 2 and "*     5" not in printed


def test_all_parts_are_of_one_checkpoint(run, tmp_path, monkeypatch):
    """Opened once: a run in training would save another between two parts, and the file would lose the first."""
    shutil.copytree(run, copy := tmp_path / "run", ignore=shutil.ignore_patterns(depths.FILE))
    monkeypatch.setattr(expert_use, "TOKENS", 512)
    opened = []
    monkeypatch.setattr(depths, "load_run", lambda run: opened.append(run) or load_run(run))
    assert main(["depth", str(copy), "--loss-only", "--instances", "2", "--depths", "1", "--experts"]) == 0
    assert opened == [copy]
    assert {"depths", "difficulty", "experts"} < set(json.loads((copy / depths.FILE).read_text()))


def test_progress_is_said_after_two_seconds_and_then_every_ten(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(depths.time, "monotonic", lambda: now[0])
    said: list[str] = []
    progress = Progress(said.append, "loss", 9)
    for _ in range(9):
        now[0] += 1.5
        progress.done("so much")
    assert said == ["loss: 9 to compute", "loss: 2 of 9, so much", "loss: 9 of 9, so much"]


def broken(folder: Path, run: Path) -> Path:
    """A copy of a run's configuration without a checkpoint, and with a file that isn't JSON."""
    (folder / "broken").mkdir()
    for path in run.iterdir():
        if path.name != "depth.json":
            (folder / "broken" / path.name).symlink_to(path)
    (folder / "broken" / "depth.json").write_text("{")
    return folder / "broken"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--depths", "0"], "'0' is not an integer of 1 or more; write --depths 1,2,4"),
        (["--depths", "1,,2"], "write --depths 1,2,4"),
        (["--depths", "2,4"], "this model has 3 layers and can't be applied at depth 4"),
        (["--rows", "0"], "'0' is not an integer of 1 or more"),
        (["--instances", "-1"], "--instances"),
        (["--seed", "x"], "'x' is not an integer of 0 or more"),
        (["--loss-only", "--rows", "3"], "--loss-only looks at all held-out records"),
        (["--experts"], "--experts goes with --loss-only"),
        (["--deepest", "3"], "dreamer depth --help"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(layered, capsys, words, message):
    assert main(["depth", str(layered), *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("words", (["depth"], ["depth", "--loss-only", "--experts"], ["analyze"]))
def test_another_tokenizer_than_that_of_training_is_refused(run, tmp_path, words, monkeypatch, capsys):
    run = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("depth.json")))
    monkeypatch.setattr("dreamer_jax.data.tokenizers.ByteTokenizer.fingerprint", "of another")
    assert main([words[0], str(run), *words[1:]]) == 2
    assert "is not the tokenizer the run was trained with" in capsys.readouterr().err
    assert not (run / "depth.json").exists() and not (run / "analysis").exists()


def test_data_that_have_changed_since_training_are_said(run, capsys):
    loaded = load_run(run)
    now = open_data(loaded.config)
    for data, said in ((now.fingerprint, False), ("", False), ("of others", True)):
        model = dataclasses.replace(loaded, meta=loaded.meta | {"data": data})
        assert data_of(model).fingerprint == now.fingerprint
        assert ("what is held out now may have been seen" in capsys.readouterr().err) is said


def test_wrong_places_are_said_in_one_line(layered, tmp_path, capsys):
    for place, message in (
        (tmp_path / "none", "none"),
        (layered / "checkpoints/0", "name the run directory; its newest checkpoint is taken"),
        ("gs://bucket/run", "gs://bucket/run: files are written into the run directory, so it has to be on a disk"),
        (broken(tmp_path, layered), "depth.json is damaged: not valid JSON"),
    ):
        assert main(["depth", str(place)]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
