"""`dreamer compare` on run directories written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dreamer_jax.cli import compare
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config, to_yaml


@pytest.fixture
def runs(tmp_path):
    """Two finished runs, LA and DR, with known metrics."""
    paths = []
    for variant, loss in (("LA", 2.0), ("DR", 1.5)):
        directory = tmp_path / variant
        directory.mkdir()
        source = tmp_path / f"{variant}.yaml"
        source.write_text(f"model: {{variant: {variant}}}\ntraining: {{batch_size: 2}}\ndata: {{sequence_length: 5}}\n")
        (directory / "config.yaml").write_text(to_yaml(load_config(source)))
        records = [{"step": 5, "tokens": 50, "loss": 3.0}, {"step": 5, "heldout/loss": loss, "heldout/perplexity": 7.0}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (directory / "summary.json").write_text(json.dumps(records[0] | records[1]))
        paths.append(str(directory))
    return paths


def test_rows_hold_cost_and_results(runs, capsys):
    assert main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["variant"], row["heldout_loss"], row["tokens"]) for row in rows] == [("LA", 2.0, 50), ("DR", 1.5, 50)]
    assert rows[0]["parameters"] > rows[1]["parameters"]  # eight layers of 64 experts against one
    assert rows[0]["heldout_exact_match"] is None
    for row in rows:  # what `dreamer budget` says of rows of the same length: a token meets half of them on average
        assert main(["budget", f"{row['run']}/config.yaml", "--context", "5", "--json"]) == 0
        assert row["flops_per_token"] == json.loads(capsys.readouterr().out)["flops_per_token"]["total"]


def test_the_cost_is_of_the_model_that_was_trained(runs, capsys, monkeypatch):
    """Not of a config.yaml that was edited since."""
    trained = load_config(Path(runs[0]) / "config.yaml").config
    monkeypatch.setattr(compare, "recorded_config", lambda place: trained)
    assert main(["compare", *runs, "--json"]) == 0
    la, dr = json.loads(capsys.readouterr().out)
    assert la["parameters"] == dr["parameters"]


def test_table_and_figure(runs, tmp_path, capsys):
    assert main(["compare", *runs, "--figure", str(tmp_path / "loss.png")]) == 0
    assert "1.5000" in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_json_stays_json_beside_a_figure(runs, tmp_path, capsys):
    figure = tmp_path / "loss.png"
    assert main(["compare", *runs, "--json", "--figure", str(figure)]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)) == 2
    assert told.err == f"figure {figure}\n" and figure.exists()


def test_every_evaluation_is_drawn(runs, tmp_path, monkeypatch):
    """Tokens follow from the step, whether or not a line of the log falls on it."""
    with open(f"{runs[1]}/metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, "heldout/loss": step / 10}) + "\n" for step in (7, 11))
    drawn = {}
    monkeypatch.setattr(compare, "draw", lambda panels, *_: drawn.update(panels) or True)
    assert main(["compare", *runs, "--figure", str(tmp_path / "loss.png")]) == 0
    curve = next(curve for name, curve in drawn[compare.LOSS].items() if name.startswith("DR"))
    assert curve == [(50, 1.5), (70, 0.7), (110, 1.1)]


def test_held_out_results_of_other_data_are_said(runs, capsys):
    assert main(["compare", *runs]) == 0
    assert "of other data" not in capsys.readouterr().out
    config = Path(runs[1]) / "config.yaml"
    config.write_text(config.read_text().replace("difficulty: 4", "difficulty: 3"))
    assert main(["compare", *runs]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"held-out results are of other data: {runs[1]} differs from {runs[0]} in data.difficulty" in said


def test_lines_of_metrics_that_no_run_writes_are_left_out(runs, capsys):
    with open(f"{runs[1]}/metrics.jsonl", "a") as file:
        for line in ({"heldout/exact_match": 0.5}, {"step": 5, "heldout/exact_match": "x"}, {"step": "5"}, [], {}):
            file.write(json.dumps(line) + "\n")
    assert main(["compare", *runs]) == 0
    assert "1.5000" in capsys.readouterr().out


def test_data_efficiency_against_a_baseline(runs, capsys):
    for run, values in zip(runs, ((0.1, 0.2), (0.1, 0.3)), strict=True):
        metrics = [{"step": step, "eval/gsm8k/strict": value} for step, value in zip((5, 10), values, strict=True)]
        with open(f"{run}/metrics.jsonl", "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in metrics)
    assert main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["accuracy"]["gsm8k"] for row in rows] == [0.2, 0.3]
    assert rows[0]["data_efficiency"]["gsm8k"] == 1.0
    assert rows[1]["data_efficiency"]["gsm8k"] == pytest.approx(10 / 7.5)  # 0.2 lies halfway between 5 and 10
    assert main(["compare", *runs, "--baseline", runs[1]]) == 0
    shown = capsys.readouterr().out
    assert "gsm8k accuracy" in shown and "20.00%" in shown
    *_, row, baseline = shown.splitlines()
    assert row.split()[-2:] == ["-", "1.00"]  # LA never gets there
    assert baseline == f"data efficiency: against {runs[1]}"
    assert main(["compare", *runs, "--baseline", "other"]) == 2
    assert "none of the runs" in capsys.readouterr().err


def test_layers_that_attend_over_depths_are_no_baseline():
    """LA+DA is a variant that is compared with LA."""
    rows = [{"variant": "DR"}, {"variant": "LA+DA"}, {"variant": "LA"}]
    assert compare._baseline(None, list("abc"), rows) == "c"
    assert compare._baseline(None, list("ab"), rows[:2]) == "a"


@pytest.mark.parametrize("damage", [lambda text: "", lambda text: text.partition("\ndata:")[0]])
def test_a_configuration_that_was_cut_short_is_no_run_of_defaults(damage, runs, capsys):
    path = Path(runs[1]) / "config.yaml"
    path.write_text(damage(path.read_text()))
    for words in (["compare", *runs], ["generate", runs[1], "--prompt", "a"]):
        assert main(words) == 2
        assert f"{path} was cut short" in capsys.readouterr().err


def test_a_slash_behind_a_run_makes_no_other_run(runs, capsys):
    """Shells complete a folder's name with one."""
    assert main(["compare", *runs, f"{runs[1]}/", "--baseline", f"{runs[1]}/", "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == runs


def results_of(**measured: tuple[float, int]) -> bytes:
    """results.json of step 5: accuracy and questions by benchmark."""
    headlines = {"gsm8k": "strict", "math": "boxed", "mathqa": "acc"}
    tasks = {
        name: {"task": name, "questions": questions, "metrics": {headlines[name]: {"value": value}}}
        for name, (value, questions) in measured.items()
    }
    return json.dumps({"source": {"step": 5}, "tasks": tasks}).encode()


def write_results(run, **measured):
    path = Path(run) / "evaluation/step-5/results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(results_of(**measured))


def test_the_average_is_of_the_benchmarks_that_all_runs_have(runs, capsys):
    write_results(runs[0], gsm8k=(0.2, 100), math=(0.1, 50), mathqa=(0.9, 20))
    write_results(runs[1], gsm8k=(0.4, 1319), math=(0.2, 50))
    assert main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["accuracy"]["average"] for row in rows] == [pytest.approx(0.15), pytest.approx(0.3)]
    assert main(["compare", *runs]) == 0
    shown = capsys.readouterr().out
    assert "average: of gsm8k, math\n" in shown
    assert f"gsm8k: not all accuracies are of the same questions: 100 in {runs[0]}, 1,319 in {runs[1]}\n" in shown
    assert "math: not all" not in shown
    write_results(runs[1], math=(0.2, 50))
    assert main(["compare", *runs]) == 0
    shown = capsys.readouterr().out
    assert "average: none, as the runs have no two benchmarks in common" in shown
    assert shown.split("average accuracy")[1].split()[:2] == ["-", "-"]


def test_damaged_files_are_said_in_one_line(runs, tmp_path, capsys):
    """And a picture that can't be drawn before anything is printed."""
    results = tmp_path / "DR/evaluation/step-5/results.json"
    results.parent.mkdir(parents=True)
    for path, content, said in (
        (results, b'{"source": {"step": 5}, "ta', "results.json is damaged: not valid JSON"),
        (results, b'{"source": {"step": 5}}', "results.json is damaged: it has no 'tasks'"),
        (results, results_of(mathqa=(0.5, 9)).replace(b'"acc"', b'"accuracy"'), "damaged: it has no 'acc'"),
        (results, b'{"source": {"step": 5}, "tasks": []}', "results.json is damaged: 'list' object has no"),
        (tmp_path / "DR/summary.json", b"[]", "summary.json is damaged: not a JSON object"),
        (tmp_path / "DR/summary.json", b"{}", "summary.json is damaged: it has no 'step'"),
        (tmp_path / "DR/summary.json", b'{"step": null, "tokens": 3}', "damaged: 'step' isn't a number"),
    ):
        path.write_bytes(content)
        assert main(["compare", *runs]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    for figure, said in (("a.txt", "must end in .png or .svg"), (f"{tmp_path}/no/a.png", "there is no folder")):
        assert main(["compare", *runs, "--figure", figure]) == 2
        told = capsys.readouterr()
        assert said in told.err and not told.out


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(runs, capsys):
    """Its summary is of the end that it had; curves go on, and so must steps, tokens and losses."""
    with open(f"{runs[1]}/metrics.jsonl", "a") as file:
        file.writelines(json.dumps(it) + "\n" for it in ({"step": 9, "tokens": 90}, {"step": 9, "heldout/loss": 0.5}))
    assert main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["steps"], row["tokens"], row["heldout_loss"]) for row in rows] == [(5, 50, 2.0), (9, 90, 0.5)]


def test_unfinished_run_is_refused(runs, tmp_path, capsys):
    (tmp_path / "DR" / "summary.json").unlink()
    assert main(["compare", *runs]) == 2
    assert "not a finished run" in capsys.readouterr().err
    (exported := tmp_path / "exported").mkdir()
    assert main(["compare", str(exported), runs[0]]) == 2
    assert "no config.yaml. Train one with `dreamer train`" in capsys.readouterr().err
    for name in ("config.json", "model.safetensors"):
        (exported / name).touch()
    for words in (["compare", runs[0]], ["depth"], ["analyze"], ["checkpoint", "list"]):
        assert main([*words, str(exported)]) == 2
        assert "an exported folder: `dreamer import` makes a run of it" in capsys.readouterr().err
