"""Files of the package by name: what a name finds, what goes first, and what is said of a name that finds nothing."""

import itertools
from pathlib import Path

import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.configs import ALL, FOLDER, files, find, kind_of, matching, name_of, names, summary
from dreamer_jax.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that has nothing of the checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_is_found_by_each_end_of_its_path_that_no_other_has() -> None:
    assert len(files()) > 40
    paths = {path: path.relative_to(FOLDER.parent).with_suffix("").as_posix().split("/") for path in files()}
    ends = {path: {"/".join(parts[at:]) for at in range(len(parts))} for path, parts in paths.items()}
    for path, its in ends.items():
        alone = {end for end in its if sum(end in theirs for theirs in ends.values()) == 1}
        assert name_of(path) in alone and "/".join(paths[path]) in alone
        for end in its:
            assert (find(end, *ALL) == path) if end in alone else (len(matching(end, ALL)) > 1)
            assert path in matching(f"{end}.yaml", ALL)


def test_names_of_every_kind() -> None:
    known = {kind: names([kind]) for kind in ALL}
    assert {"quickstart", "la_16", "huginn/tiny", "huginn/3b5", "graph_laptop"} < set(known["configuration"])
    assert {"gsm8k_math", "mixtures/paper"} < set(known["mixture"])
    assert "zoo" in known["study"] and known["frontier model"] == ["dr", "dreamer", "huginn"]
    every = list(itertools.chain(*known.values()))
    assert len(every) == len(set(every)) == len(files())


def test_a_kind_of_file_is_looked_for_where_two_have_a_name() -> None:
    assert find("paper", "mixture") == FOLDER / "mixtures/paper.yaml"
    assert find("paper", "configuration") == FOLDER / "models/paper.yaml"
    assert kind_of(FOLDER / "mixtures/paper.yaml") == "mixture" and kind_of(Path("mine.yaml")) == "configuration"


def test_a_file_that_exists_goes_first(elsewhere: Path) -> None:
    (elsewhere / "quickstart").write_text("run:\n  seed: 77\n")
    (elsewhere / "configs" / "models").mkdir(parents=True)
    (elsewhere / "configs/models/la_16.yaml").write_text("run:\n  seed: 78\n")
    assert load_config("quickstart").config.run.seed == 77
    assert load_config("configs/models/la_16.yaml").config.run.seed == 78
    assert load_config("quickstart.yaml").config.run.seed == load_config("configs/quickstart.yaml").config.run.seed == 0
    assert load_config("la_16").config.model == load_config(FOLDER / "models/la_16.yaml").config.model


def test_a_folder_with_a_name_is_not_gone_past(elsewhere: Path) -> None:
    (elsewhere / "quickstart").mkdir()
    with pytest.raises(ConfigError, match=r"^quickstart: is a directory; write quickstart\.yaml for the file of the p"):
        load_config("quickstart")
    (elsewhere / "quickstart" / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"or quickstart/config\.yaml for that of the run$"):
        load_config("quickstart")


def test_errors_in_the_files_keep_file_and_line() -> None:
    with pytest.raises(ConfigError, match=rf"{FOLDER}/models/la_tiny\.yaml:\d+"):
        load_config("la_tiny", ["--model.family", "ouro"])
    assert load_config("dr_16").origins["model.variant"].startswith(f"{FOLDER}/models/dr_16.yaml:")
    assert load_config("dr_16").origins["model.hidden_size"].startswith(f"{FOLDER}/models/paper.yaml:")


def test_in_a_checkout_origins_name_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    assert load_config("dr_16").origins["model.hidden_size"].startswith("dreamer_jax/configs/models/paper.yaml:")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["train", "la_15"],
            "la_15: no such file, and the package has no configuration of this name; did you mean 'la_1",
        ),
        (["train", "hugin/tiny"], "did you mean 'huginn/tiny'? `dreamer config list` shows all"),
        (["budget", "configs/quickstrat.yaml"], "did you mean 'quickstart'?"),
        (
            ["plan", "nothing_like_it", "--topology", "v5e:2x2"],
            "no configuration of this name; `dreamer config list` shows all",
        ),
        (
            ["config", "check", "tiny"],
            "tiny: several have this name; write algoformer/tiny or cotformer/tiny or huginn/",
        ),
        (["config", "show", "paper"], "paper: several have this name; write mixtures/paper or models/paper"),
        (["config", "show", "zoo", "--run.seed", "3"], "zoo is a study and is shown as it is; leave --run.seed out"),
        (["config", "list", "all"], "config list: unexpected 'all'"),
        (
            ["data", "prepare", "gsm8k_mat", "--out", "x"],
            "the package has no mixture of this name; did you mean 'gsm8k_math'? it has gsm8k_math, "
            "gsm8k_math_bpe, gsm8k_math_bytes, mixtures/paper",
        ),
        (
            ["study", "zo"],
            "the package has no study of this name; did you mean 'zoo'? `dreamer config list` shows all",
        ),
        (["match", "dr_16", "--to", "la_17"], "did you mean 'la_16'?"),
        (["bench", "train", "--config", "la_tinny"], "did you mean 'la_tiny'?"),
    ],
)
def test_a_name_that_finds_nothing(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert expected in said and len(said.splitlines()) == 1


def test_list_has_a_line_for_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "list"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [name for name, _ in lines] == [name_of(path) for kind in ALL for path in files() if kind_of(path) == kind]
    said = dict(lines)
    assert said["quickstart"].startswith("A small DR+DA that learns to evaluate nested boolean expressions on a laptop")
    assert said["models/paper"] == "What the paper's six models share (Table 3)"
    assert len(set(said.values())) == len(said), "two files that say the same of themselves can't be told apart"


def test_a_summary_is_the_first_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# Of Geiping et al. (2025), 3.5\n# billion weights. Second.\n#   a command\nmodel:\n")
    assert summary(path) == "Of Geiping et al. (2025), 3.5 billion weights"
    path.write_text("# Needs:\n#   a command\n")
    assert summary(path) == "Needs"


def test_show_prints_what_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "zoo"]) == 0
    assert capsys.readouterr().out == (FOLDER / "studies/zoo.yaml").read_text()
    assert main(["config", "show", "huginn", "--run.seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert "family: huginn_classifier" in shown and "seed: 3  # command line" in shown
