"""A study computes each cell once and as a pass of its own would, goes on where it was, and reads its tables right."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.cli import frontier as command
from dreamer_jax.cli.main import main
from dreamer_jax.data.puzzles import PuzzleSource
from dreamer_jax.errors import UserError
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.families.puzzles import logits_by_depth
from dreamer_jax.runs.models import load_run
from dreamer_jax.studies import cells, frontier, frontier_figures, variants
from dreamer_jax.studies.frontier_figures import borders
from dreamer_jax.studies.frontier_tables import fewest_steps, markdown
from dreamer_jax.studies.published import PUBLISHED
from tests.outside import paper_tables

TINY = [
    *("--model.hidden_size", "8", "--model.heads", "2", "--model.mlp_size", "8"),
    *("--training.steps", "3", "--training.warmup_steps", "1", "--training.batch_size", "8"),
    *("--data.heldout_records", "8", "--evaluation.harder", "0"),
]
INSTANCES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished study of one tiny model."""
    folder = tmp_path_factory.mktemp("study")
    assert command.run(["graph", "--seeds", "1", "--out", str(folder), "--instances", str(INSTANCES), *TINY]) == 0
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def again(folder: Path, *words: str) -> int:
    return command.run(["graph", "--seeds", "1", "--out", str(folder), "--instances", str(INSTANCES), *TINY, *words])


def test_what_a_study_leaves(folder: Path) -> None:
    result = json.loads((folder / "frontier.json").read_text())
    model = result["models"]["depth_recurrent"]
    assert result["depths"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12] and result["steps"][-1] == 20
    assert model["trained"] == {"depths": [1, 5], "steps": [5, 8]}
    assert [len(row) for row in model["seeds"]["0"]["accuracy"].values()] == [20] * 11
    assert (folder / "frontier.png").is_file()
    assert frontier.size(model).endswith(" parameters, 1 seed")
    assert frontier.size({"parameters": 1234, "seeds": {"0": {}, "1": {}}}) == "1,234 parameters, 2 seeds"
    assert load_run(folder / "depth_recurrent/seed0").step == 3


def test_fewest_steps_are_those_that_nothing_is_lost_after() -> None:
    assert fewest_steps([0.5, 0.96, 0.9, 0.95, 1.0]) == 4
    assert fewest_steps([0.95, 0.95]) == 1
    assert fewest_steps([1.0, 0.94]) is None


def test_tables_of_a_page(folder: Path) -> None:
    result = json.loads((folder / "frontier.json").read_text())
    assert (folder / "frontier.md").read_text() == markdown(result)
    one, other = [[0.5, 1.0, 1.0], [0.25, 0.5, 0.75]], [[1.0, 1.0, 1.0], [0.75, 0.5, 0.25]]
    seeds = {str(i): {"accuracy": dict(zip("12", rows, strict=True))} for i, rows in enumerate((one, other))}
    model = {"headline": "tiny", "parameters": 1234, "seeds": seeds}
    made = markdown({"task": "graph", "depths": [1, 2], "steps": [1, 3], "models": {"toy": model}})
    assert made.split("\n\n")[1:] == [
        "**toy**: tiny, 1,234 parameters, 2 seeds",
        "| hops | T = 1 | T = 3 |\n| --- | --- | --- |\n| 1 | 0.75 | 1.00 |\n| 2 | 0.50 | 0.50 |",
        "| hops | 1 | 2 |\n| --- | --- | --- |\n| seed 0 | 2 | - |\n| seed 1 | 1 | - |\n",
    ]


@pytest.mark.parametrize("steps", [1, 20])
def test_cells_are_those_of_a_pass_of_so_many_steps(folder: Path, steps: int) -> None:
    model = load_run(folder / "depth_recurrent/seed0")
    batch = PuzzleSource(model.config.data.puzzle, 16).cell(7, range(INSTANCES), INSTANCES)
    passed = forward(model.family, model.params, model.model_state, batch, steps)
    _, correct = model.family.evaluate(model.params, passed, batch)
    share = np.asarray(correct)[batch["loss_mask"]].mean()
    found = json.loads((folder / "frontier.json").read_text())["models"]["depth_recurrent"]["seeds"]["0"]
    assert found["accuracy"]["7"][steps - 1] == pytest.approx(share)


def test_nothing_is_computed_twice(folder: Path, monkeypatch, capsys) -> None:
    before = (folder / "frontier.json").read_text()
    computed = []
    cell = cells._cell

    def counted(model, source, depth, *rest):
        computed.append(depth)
        return cell(model, source, depth, *rest)

    monkeypatch.setattr(cells, "_cell", counted)
    monkeypatch.setattr(frontier, "train", lambda *_: pytest.fail("a finished run was trained again"))
    assert again(folder) == 0 and computed == []
    kept = folder / "depth_recurrent/seed0/cells.json"
    known = json.loads(kept.read_text())
    del known["accuracy"]["4"], known["accuracy"]["12"]
    kept.write_text(json.dumps(known))
    assert again(folder) == 0 and computed == [4, 12]
    assert (folder / "frontier.json").read_text() == before
    kept.write_text(json.dumps({**known, "weights": known["weights"][::-1]}))  # of the same step
    computed.clear()
    assert again(folder) == 0 and sorted(computed) == sorted([4, 12, *map(int, known["accuracy"])])
    assert (folder / "frontier.json").read_text() == before
    assert "-0.50" in capsys.readouterr().out  # from what the paper has above the diagonal


def test_what_another_process_wrote_meanwhile_stays(folder: Path, monkeypatch) -> None:
    file = folder / "frontier.json"
    before = file.read_text()
    now = json.loads(before)
    now["models"]["other"] = now["models"]["depth_recurrent"]
    accuracies = frontier.accuracies
    monkeypatch.setattr(frontier, "accuracies", lambda *its: file.write_text(json.dumps(now)) and accuracies(*its))
    assert again(folder) == 0 and json.loads(file.read_text()) == now
    monkeypatch.undo()
    file.write_text(before)
    assert again(folder) == 0 and file.read_text() == before


def test_another_study_in_the_folder_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="holds another study: instances 60 instead of 2000; use another --out"):
        command.run(["graph", "--seeds", "1", "--out", str(folder), *TINY])
    with pytest.raises(UserError, match=r"model\.hidden_size: 8 -> 16"):
        again(folder, "--model.hidden_size", "16")


HEADED = {"headline": "DR", "parameters": 1}


@pytest.mark.parametrize(
    "models",
    [
        *([], {"dr": {}}, {"dr": HEADED}, {"dr": {**HEADED, "seeds": None}}),
        *({"dr": {**HEADED, "seeds": {"0": its}}} for its in ({}, None, {"accuracy": {"1": [0.5]}})),
    ],
)
def test_a_damaged_result_is_said(models: object, tmp_path: Path) -> None:
    about = frontier.open_result(tmp_path, "graph", "laptop", 10)
    (tmp_path / "frontier.json").write_text(json.dumps({**about, "models": models}))
    with pytest.raises(UserError, match=r"frontier\.json is damaged: .*remove it"):
        frontier.open_result(tmp_path, "graph", "laptop", 10)


@pytest.mark.parametrize("accuracy", [None, [1], {"1": None}, {"1": [0.5]}])
def test_damaged_cells_are_said(accuracy: object, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cells, "load_run", lambda run: SimpleNamespace(step=3, digest="d"))
    kept = {"step": 3, "weights": "d", "steps": 2, "instances": 10}
    (tmp_path / "cells.json").write_text(json.dumps({**kept, "accuracy": accuracy}))
    with pytest.raises(UserError, match=r"cells\.json is damaged: .*remove it"):
        cells.accuracies(tmp_path, [1], 2, 10, lambda _: None)


def test_a_file_is_no_folder(tmp_path: Path, capsys) -> None:
    (tmp_path / "out").touch()
    for words in (["--run.dir", "x"], ["--run.dir=x"]):
        assert main(["frontier", "graph", "--preset", "laptop", *words]) == 2
        assert "name the folder with --out" in capsys.readouterr().err
    assert main(["frontier", "graph", "--preset", "laptop", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("/out: is a file; name a folder\n")


def test_what_cannot_be_asked_is_refused_before_training(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(frontier, "train", lambda *_: pytest.fail("started to train"))
    words = ["frontier", "graph", "--preset", "laptop", "--out", str(tmp_path)]
    for wrong, said in (
        (["--model.max_depth", "9"], "can't think for 20"),
        (["--data.puzzle.nodes", "8"], "graph has depths 1 to 5"),
        (["--run.seed", "4"], "--seeds"),
    ):
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_what_is_known_of_another_model_of_the_name_goes() -> None:
    """Its runs were removed, or there would have been a refusal: its parameters and seeds aren't the new one's."""
    result: dict = {"models": {}}
    sizes = (["--model.mlp_size", size] for size in ("8", "16"))
    small, wide = (variants.variants_of("graph", "paper", False, [], words) for words in sizes)
    frontier.entry_of(result, small[0])["seeds"]["1"] = {"accuracy": {}}
    assert frontier.entry_of(result, small[0])["seeds"]
    found = frontier.entry_of(result, wide[0])
    assert found == frontier.describe(wide[0].loaded.config) and result["models"][wide[0].name] is found


def test_two_models_of_one_name_would_share_a_folder(tmp_path: Path) -> None:
    """And the second would be refused after the first has been trained."""
    (tmp_path / "no_gate.yaml").write_text("model: {family: huginn_classifier}\n")
    with pytest.raises(UserError, match="has a model no_gate already"):
        variants.variants_of("boolean", "laptop", True, [str(tmp_path / "no_gate.yaml")], [])


@pytest.mark.slow
def test_gradients_by_step(folder: Path) -> None:
    run, steps = folder / "depth_recurrent/seed0", 4
    norms = cells.gradient_norms(run, steps, 6)
    model = load_run(run)
    batch = PuzzleSource(model.config.data.puzzle, 16).cell(5, range(6), 6)
    family, fresh = model.family, initialise(model.family, jax.random.key(0))[0]

    @jax.jit
    def gradient(params):
        def difference(state):
            passed = forward(family, params, {}, batch, steps, initial_state=state)
            logits = family.class_logits(params, passed.state, passed.memory, passed.context)
            return jnp.sum(logits @ jnp.array([-1.0, 1.0]))

        return jax.grad(difference)(params["embedding"][batch["tokens"]])

    for name, params in (("fresh", fresh), ("trained", model.params)):
        rows = np.reshape(gradient(params), (6, -1))
        assert len(norms[name]) == steps + 1
        assert norms[name][0] == pytest.approx(np.mean(np.linalg.norm(rows, axis=-1)), rel=1e-4)


def result_of(accuracy: dict[str, list[list[float]]]) -> frontier.Result:
    """A study with these cells for each seed, the same at all depths."""
    seeds = {str(i): {"accuracy": {str(d): row for d in (8, 12)}} for i, row in enumerate(accuracy["base"])}
    return {"task": "graph", "depths": [8, 12], "steps": [1, 2, 12, 15], "models": {"base": {"seeds": seeds}}}


def test_tables() -> None:
    rows = [[0.6] + [0.5] * 10 + [0.8] * 9, [0.8] + [0.5] * 10 + [1.0] * 9]
    result = result_of({"base": rows})
    np.testing.assert_allclose(frontier.mean_cells(result, "base"), [[0.7, 0.5, 0.9, 0.9]] * 2)
    np.testing.assert_allclose(frontier.published_cells(result), [[0.51, 0.54, 0.97, 1.0], [0.51, 0.53, 0.5, 0.5]])
    assert frontier.supervision(result, "base") == pytest.approx({"shortcut": 0.7, "far": 0.9})


def test_borders_of_training() -> None:
    assert borders([1, 2, 3, 5, 8, 12], [5, 8]) == [2.5, 4.5]
    assert borders([1, 2, 3], [1, 3]) == []  # they would lie on the frame
    assert borders([2, 4, 6], [1, 4]) == [1.5]
    assert borders([2, 4, 6], None) == []


def test_every_panel_has_its_own_borders(tmp_path: Path, monkeypatch) -> None:
    """The paper's are not those of a smaller study beside it."""
    drawn = []
    monkeypatch.setattr(frontier_figures, "_panel", lambda axes, result, cells, trained: drawn.append(trained))
    ours = {"depths": [1, 4], "steps": None}
    model = {"parameters": 1, "seeds": {"0": {"accuracy": {"2": [0.5]}}}, "trained": ours}
    frontier_figures.draw({"task": "boolean", "depths": [2], "steps": [1], "models": {"dr": model}}, tmp_path)
    assert drawn[:2] == [{"depths": (1, 8), "steps": (4, 16)}, ours]


def test_what_training_draws() -> None:
    """From the paper's configurations it is the paper's; models that draw their own tail have no ends."""
    for task, published in PUBLISHED.items():
        (variant,) = variants.variants_of(task, "paper", False, [], [])
        found = frontier.trained_range(variant.loaded.config)
        assert found == {"depths": list(published.trained_depths), "steps": list(published.trained_steps)}
    words = ["--recurrence.draw", "uniform", "--recurrence.least", "2"]
    for models, more, steps in (
        (["huginn"], [], None),
        (["dr"], [], [8, 8]),
        (["dr"], words, [2, 8]),
        (["dr"], [*words, "--recurrence.most", "6"], [2, 6]),
        (["dr"], ["--recurrence.draw", "fixed", "--recurrence.mean", "3"], [3, 3]),
        (["dr"], ["--recurrence.draw", "exponential"], None),
    ):
        config = variants.variants_of("boolean", "laptop", False, models, more)[-1].loaded.config
        assert frontier.trained_range(config)["steps"] == steps


def test_the_papers_numbers() -> None:
    for task, published in PUBLISHED.items():
        table = paper_tables()["thinking_deeper"][task]
        depths = next(table[name] for name in table if name.startswith("rows"))
        assert (list(published.accuracy), list(published.steps)) == (depths, table["cols_steps"])
        assert [list(row) for row in published.accuracy.values()] == table["accuracy"]


@pytest.mark.parametrize("task", ["graph", "boolean", "family"])
@pytest.mark.parametrize("preset", ["paper", "laptop"])
def test_configurations_fit_their_cells(task: str, preset: str) -> None:
    (variant,) = variants.variants_of(task, preset, False, [], [])
    config, grid = variant.loaded.config, frontier.GRIDS[task, preset]
    assert variants.parameters(config) < 1_000_000
    assert config.model.max_depth >= max(grid.steps)
    source = PuzzleSource(config.data.puzzle, config.data.sequence_length)
    assert config.model.vocab_size == source.tokenizer.vocab_size
    wider = PuzzleSource(config.data.puzzle, 100)
    for depth in grid.depths:
        wider.check(depth, "a test")
    assert max(grid.depths) > config.data.puzzle.difficulty and max(grid.steps) > config.model.depth
    if preset == "paper":
        assert set(PUBLISHED[task].accuracy) <= set(grid.depths) and PUBLISHED[task].steps == grid.steps


def test_variants() -> None:
    words = ["--model.gate_bias", "-1", "--training.steps=150"]
    base, leaky, every, no_gate, no_embedding = variants.variants_of("graph", "laptop", True, [], words)
    configs = [each.loaded.config for each in (base, leaky, every, no_gate, no_embedding)]
    assert all(config.model.gate_bias == -1 for config in configs)
    assert [config.training.steps for config in configs] == [150, 1200, 1200, 150, 150]
    assert [config.data.puzzle.negatives for config in configs] == ["swap", "leaky", "leaky", "swap", "swap"]
    assert [config.model.loss_at for config in configs] == ["last", "last", "every", "last", "last"]
    assert [config.training.learning_rate for config in configs] == [1e-3, 2e-3, 2e-3, 1e-3, 1e-3]
    assert [config.model.dropout for config in configs] == [0.1, 0, 0, 0.1, 0.1]
    assert [config.model.gate for config in configs] == [True, True, True, False, True]
    assert [config.model.depth_embedding_std for config in configs] == [1, 1, 1, 1, 0]
    loaded = base.with_run(Path("runs/x/seed2"), 2)
    assert (loaded.config.run.dir, loaded.config.run.seed) == ("runs/x/seed2", 2)


@pytest.mark.parametrize("model", ["dr", "dreamer", "huginn"])
def test_other_families_have_as_many_parameters(model: str) -> None:
    base, other = variants.variants_of(
        "graph", "paper", False, [model], ["--training.steps", "700", "--model.depth", "6"]
    )
    ours, theirs = base.loaded.config, other.loaded.config
    assert variants.parameters(ours) == 201_474
    assert abs(variants.parameters(theirs) / 201_474 - 1) < 0.05
    assert ours.training == theirs.training and ours.data == theirs.data and ours.training.steps == 700
    assert (ours.model.depth, theirs.model.depth) == (8, 6)
    assert (theirs.model.vocab_size, theirs.model.readout, theirs.model.positions) == (3, "pair", "none")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dr", "dreamer"])
def test_a_long_pass_answers_as_short_ones_do(model: str) -> None:
    """What makes one pass enough for all numbers of steps: nothing in it knows how long it will be."""
    _, other = variants.variants_of("graph", "paper", False, [model], [])
    family = build(other.loaded.config.model)
    params, state = initialise(family, jax.random.key(0))
    batch = PuzzleSource(other.loaded.config.data.puzzle, 16).cell(3, range(4), 4)
    long, short = (logits_by_depth(family, params, state, batch, steps) for steps in (6, 3))
    np.testing.assert_allclose(long[:3], short, rtol=0, atol=1e-5 * np.abs(short).max())


@pytest.mark.parametrize(
    ("setting", "value"), [("depth_counters", "both"), ("depth_scaling", "interpolated"), ("residual_scale", "depth")]
)
def test_a_model_whose_steps_know_the_depth_of_the_pass_is_refused(setting: str, value: str) -> None:
    words = [f"--model.{setting}", value]
    with pytest.raises(UserError, match=rf"^dreamer: model\.{setting} is {value}, .* Set it to \w+"):
        variants.variants_of("graph", "paper", False, ["dreamer"], words)
    _, other = variants.variants_of("graph", "paper", False, ["huginn"], [])
    assert not hasattr(other.loaded.config.model, setting)  # and is taken


def test_the_nearest_number_of_parameters_is_found() -> None:
    model = variants.variants_of("graph", "paper", False, [], [])[0].loaded.config.model
    family = build(dataclasses.replace(model, mlp_size=7))
    assert variants.match_parameters(family, 201_474).config.mlp_size == 256
    assert variants.match_parameters(family, 201_474 + 130).config.mlp_size == 257  # a neuron more: 257 parameters
    assert variants.match_parameters(family, 201_474 + 120).config.mlp_size == 256
    with pytest.raises(UserError, match=r"use a smaller --model\.hidden_size"):
        variants.match_parameters(family, 50_000)


def test_messages() -> None:
    with pytest.raises(UserError, match="invalid choice: 'maze'"):
        command.run(["maze"])
    with pytest.raises(UserError, match=r"nobody: .* no frontier model of this name; it has dr, dreamer, huginn"):
        command.run(["graph", "--model", "nobody"])
