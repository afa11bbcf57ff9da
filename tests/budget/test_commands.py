"""`dreamer budget` and `dreamer match` as a person calls them."""

import json
import shutil
from pathlib import Path

import jax
import pytest

from dreamer_jax.budget import report
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.configs import FOLDER
from dreamer_jax.parallel import make_mesh
from dreamer_jax.planning.step_cost import operations
from dreamer_jax.training.state import abstract_state

MODELS = FOLDER / "models"


def path(name: str) -> str:
    return str(MODELS / f"{name}.yaml")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


def test_budget_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    its = json.loads(run(capsys, "budget", path("dr_da_16"), "--json"))
    assert its["parameters"]["total"] == sum(v for k, v in its["parameters"].items() if k != "total")
    assert round(its["parameters"]["total"] / 1e9, 4) == 1.1708
    assert round(its["flops_per_token"]["total"] / 1e9, 4) == 0.9404
    assert its["parameters_folded"]["total"] < its["parameters"]["total"]
    assert its["active_parameters"]["total"] < its["parameters"]["total"] / 2
    assert its["generation_bytes"]["DA cache"] == 2 * 16 * 128 * 2
    assert its["training"]["factor"] == 3
    assert its["training"]["executed_factor"] > its["training"]["factor"]
    assert its["training"]["bytes"]["full"]["total"] < its["training"]["bytes"]["none"]["total"]


def test_budget_as_a_table_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "budget", path("dr_da_16"))
    for words in (
        "embedding",
        "SA",
        "DA",
        "EA",
        "routers",
        "head",
        "folded (Eq. 8)",
        "remat full",
        "SA cache",
        "active",
    ):
        assert words in text
    assert "1,170,846,080" in text
    assert "940.417" in text


def test_budget_takes_depth_context_batch_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    usual = json.loads(run(capsys, "budget", path("la_tiny"), "--json"))
    deep = json.loads(run(capsys, "budget", path("la_tiny"), "--json", "--depth", "16"))
    assert deep["parameters"]["EA"] == 2 * usual["parameters"]["EA"]
    wide = json.loads(run(capsys, "budget", "--model.num_experts", "32", path("la_tiny"), "--json"))
    assert wide["parameters"]["EA"] == pytest.approx(2 * usual["parameters"]["EA"], rel=1e-3)
    long = json.loads(run(capsys, "budget", path("la_tiny"), "--json", "--context", "2048", "--batch", "3"))
    assert long["generation_bytes"]["SA cache"] == 6 * usual["generation_bytes"]["SA cache"]
    assert long["flops_per_token"]["SA"] > usual["flops_per_token"]["SA"]


def test_budget_computes_every_copy_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """As the run, its plan and comparisons of runs do."""
    words = "dr_da_tiny", "--data.sequence_length"
    once = json.loads(run(capsys, "budget", *words, "512", "--json"))["training"]
    copied = json.loads(run(capsys, "budget", *words, "256", "--data.copies", "2", "--json"))["training"]
    for name, value in once.items():
        if name.endswith("flops_per_token"):
            assert copied[name] == 2 * value
    assert copied["factor"] == once["factor"] and copied["sequence_length"] == once["sequence_length"]
    assert "S = 512 (2 of each token)" in run(capsys, "budget", *words, "256", "--data.copies", "2")


def test_budget_has_moments_of_what_is_trained_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = "quickstart", "--training.trainable", "head,norm"
    held = json.loads(run(capsys, "budget", *words, "--json"))["training"]["bytes"]["full"]
    config = load_config(words[0], list(words[1:])).config
    moments = [leaf for leaf in jax.tree.leaves(abstract_state(config, make_mesh(config.mesh)).optimizer) if leaf.ndim]
    assert held["optimizer"] == sum(leaf.size * leaf.dtype.itemsize for leaf in moments) < 0.1 * held["weights"]
    optimizer = operations(config, "v5e")[-1]
    assert optimizer.bytes == 4 * held["optimizer"]  # AdamW reads and writes eight arrays, of which two are these


def test_budget_counts_the_program_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "budget", path("dr_da_tiny"), "--program", "--devices", "8")
    assert "lowered program (8 devices" in text
    assert "(+0)" in text and "(+0.0000 %)" in text


def test_match_prints_each_search_and_the_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "match", path("dr_16"), "--to", path("la_16"), "--model.num_experts", "9")
    assert text.count("expert_size") >= 3
    assert "-0.697 %" in text  # after the first search of F, from 32 * 16 experts
    assert "num_experts 517, expert_size 504" in text


def test_match_as_json_and_as_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "matched.yaml"
    words = ["match", "dr_da_16", "--to", "la_16", "--depth", "32", "--json", "--write", str(out)]
    its = json.loads(run(capsys, *words))
    assert (its["num_experts"], its["expert_size"]) == (1097, 472)
    assert set(its["baseline"]) == {"params", "flops_per_token", "memory_bytes"} == set(its["gaps_percent"])
    assert its["gaps_percent"]["params"] == pytest.approx(100 * (its["params"] / its["baseline"]["params"] - 1))
    assert load_config(out).config.model == load_config(path("dr_da_32")).config.model


def test_match_to_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    its = json.loads(run(capsys, "match", path("dr_16"), "--params", "1e9", "--flops", "0.8e9", "--json"))
    assert abs(its["gaps_percent"]["params"]) < 0.05 and abs(its["gaps_percent"]["flops_per_token"]) < 0.3
    its = json.loads(run(capsys, "match", path("dr_16"), "--params", "1e9", "--json"))
    assert its["expert_size"] == 504 and list(its["gaps_percent"]) == ["params"]


def test_match_a_family(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = run(capsys, "match", "--family", "8,16", "--variants", "LA,DR,DR+DA", "--write", ".")
    assert "dr_da_8" in text
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["dr_16", "dr_8", "dr_da_16", "dr_da_8", "la_16", "la_8"]
    for name in ("la_16", "dr_16", "dr_da_16"):
        assert load_config(tmp_path / f"{name}.yaml").config.model == load_config(path(name)).config.model


def test_bad_words_get_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--foo" in fail(capsys, "budget", path("la_16"), "--foo")
    assert "integer of 1 or more" in fail(capsys, "budget", path("la_16"), "--depth", "0")
    twice = ("--depth", "4", "--model.depth", "2")
    assert "--depth and --model.depth are the same" in fail(capsys, "budget", path("la_16"), *twice)
    assert "--depth and --model.depth are the same" in fail(capsys, "match", "dr_16", "--to", path("la_16"), *twice)
    assert "did you mean '--model.depth'" in fail(capsys, "budget", path("la_16"), "--model.dept", "3")
    assert "no such file" in fail(capsys, "budget", path("la_17"))
    assert "no configuration" in fail(capsys, "match")
    assert "nothing to match to" in fail(capsys, "match", path("dr_16"))
    assert "use one of them" in fail(capsys, "match", path("dr_16"), "--to", path("la_16"), "--params", "1e9")
    assert "--hold flops needs --flops" in fail(capsys, "match", path("dr_16"), "--params", "1e9", "--hold", "flops")
    assert "positive number" in fail(capsys, "match", path("dr_16"), "--params", "many")
    assert "more than the target" in fail(capsys, "match", path("dr_16"), "--params", "1e8")
    assert "twice" in fail(capsys, "match", "--family", "8,8", "--to", path("la_16"))
    assert "no meaning for a family" in fail(capsys, "match", "--family", "8", "--to", path("la_16"), "--depth", "8")
    copy = tmp_path / "dr.yaml"
    shutil.copy(MODELS / "la_tiny.yaml", copy)
    assert "made of this file" in fail(capsys, "match", str(copy), "--to", path("la_tiny"), "--write", str(copy))


@pytest.mark.parametrize("command", ["budget", "match"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "--json" in run(capsys, command, "--help")


def test_columns_are_aligned() -> None:
    lines = report.table(["a", "number"], [["long name", "1"], ["b", "22,000,000"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].startswith("long name")
