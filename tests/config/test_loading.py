"""Precedence, origins, and one message for each kind of mistake in a file."""

import subprocess
import sys
from pathlib import Path

import pytest

from dreamer_jax.config import load_config, to_yaml
from dreamer_jax.config.keys import convert, key_types, nearest_key
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.configs import FOLDER
from dreamer_jax.errors import ConfigError


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_precedence_and_origins(tmp_path: Path) -> None:
    write(tmp_path, "model:\n  depth: 2\n  hidden_size: 64\n  num_experts: 9\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\n\nmodel:\n  hidden_size: 96\n  num_experts: 10\n")
    loaded = load_config(path, ["--model.num_experts", "11", "--run.dir=x=y"])
    model = loaded.config.model
    assert (model.depth, model.hidden_size, model.num_experts, model.sa_heads) == (2, 96, 11, 4)
    assert loaded.config.run.dir == "x=y"
    assert loaded.origins["model.depth"] == f"{tmp_path}/base.yaml:2"
    assert loaded.origins["model.hidden_size"] == f"{path}:4"
    assert loaded.origins["model.num_experts"] == loaded.origins["run.dir"] == "command line"
    assert loaded.origins["model.sa_heads"] == "default"
    assert set(loaded.origins) == set(key_types(DreamerConfig))


def test_a_section_within_a_section(tmp_path: Path) -> None:
    path = write(tmp_path, "data:\n  puzzle:\n    task: boolean\n    difficulty: 8\n  source: puzzle\n")
    loaded = load_config(path, ["--data.puzzle.difficulty", "9"])
    puzzle = loaded.config.data.puzzle
    assert (puzzle.task, puzzle.difficulty, puzzle.nodes, loaded.config.data.source) == ("boolean", 9, 16, "puzzle")
    assert loaded.origins["data.puzzle.task"] == f"{path}:3"
    again = write(tmp_path, to_yaml(loaded), "b.yaml")
    assert load_config(again).config == loaded.config
    assert "  puzzle:\n    task: boolean  # " in again.read_text()


def test_files_that_no_source_reads_are_refused() -> None:
    """Else the built-in task would be trained on in their place, without a word."""
    for key in ("path", "heldout_path"):
        with pytest.raises(ConfigError, match=r"mine\.jsonl: data\.source task reads no files; set data\.source"):
            load_config("quickstart", [f"--data.{key}", "mine.jsonl"])
    assert load_config("la_tiny", ["--data.path", "mine.jsonl", "--data.source", "jsonl"]).config.data.path


def test_base_is_relative_to_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "run: {seed: 7}\n", "root.yaml")
    write(tmp_path, "base: ../root.yaml\n", "deep/middle.yaml")
    assert load_config(write(tmp_path, "base: deep/middle.yaml\n")).config.run.seed == 7


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "model:\n"])
def test_an_empty_file_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert set(load_config(write(tmp_path, text)).origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("written", "value"), [("3e-4", 3e-4), ("1", 1.0), ("1.", 1.0), ("2.5E+0", 2.5), ("1e-3", 1e-3), (".5", 0.5)]
)
def test_numbers_as_people_write_them(tmp_path: Path, written: str, value: float) -> None:
    from_file = load_config(write(tmp_path, f"training:\n  learning_rate: {written}\n")).config.training.learning_rate
    from_words = load_config(write(tmp_path, ""), ["--training.learning_rate", written]).config.training.learning_rate
    assert from_file == from_words == value and type(from_file) is float


def test_text_is_taken_as_written(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, 'run: {dir: 2026-01-01}\ndata: {prompt: "a\\n", completion: on}\n')).config
    assert (config.run.dir, config.data.prompt, config.data.completion) == ("2026-01-01", "a\n", "on")


MISTAKES = {
    "unknown key": ("model:\n  dpeth: 8\n", "a.yaml:2: unknown key 'model.dpeth'; did you mean 'model.depth'?"),
    "unknown section": ("\nmodle:\n  depth: 8\n", "a.yaml:2: unknown key 'modle'; did you mean 'model'?"),
    "other section": (
        "run:\n  learning_rate: 1\n",
        "a.yaml:2: unknown key 'run.learning_rate'; did you mean 'training.l",
    ),
    "no section": ("depth: 8\n", "a.yaml:1: unknown key 'depth'; did you mean 'model.depth'?"),
    "dotted": (
        "model.depth: 8\n",
        "a.yaml:1: unknown key 'model.depth'; write 'depth:' on an indented line under 'model:'",
    ),
    "family is a list": ("model: {family: [dreamer]}\n", "a.yaml:1: model.family: expected one value, got a list"),
    "family is nothing": ("model: {family: }\n", "a.yaml:1: model.family: has no value"),
    "nothing alike": ("model:\n  zzz: 8\n", "a.yaml:2: unknown key 'model.zzz'; `dreamer train --help` lists"),
    "doubled key": ("model:\n  depth: 8\n  depth: 8\n", "a.yaml:3: 'model.depth' is set twice, first on line 2"),
    "doubled section": ("run: {seed: 1}\nrun: {seed: 2}\n", "a.yaml:2: 'run' is set twice, first on line 1"),
    "not an integer": ("model:\n  depth: eight\n", "a.yaml:2: model.depth: expected an integer, got 'eight'"),
    "float for integer": ("model: {depth: 8.0}\n", "a.yaml:1: model.depth: expected an integer, got '8.0'"),
    "quoted integer": ('model: {depth: "8"}\n', "a.yaml:1: model.depth: expected an integer, got '8' in quotes"),
    "huge integer": (f"model: {{depth: {'9' * 5000}}}\n", "a.yaml:1: model.depth: expected an integer, got '999"),
    "not a number": (
        "training: {learning_rate: fast}\n",
        "a.yaml:1: training.learning_rate: expected a number, got 'fa",
    ),
    "infinite": (
        "training: {learning_rate: .inf}\n",
        "a.yaml:1: training.learning_rate: expected a number, got '.inf'",
    ),
    "not a choice": ("model: {variant: DR+AD}\n", "got 'DR+AD'; did you mean 'DR+DA'?"),
    "section within": ("data:\n  puzzle: 3\n", "a.yaml:2: data.puzzle: expected keys and values, got '3'"),
    "key within": (
        "data:\n  puzzle: {dificulty: 3}\n",
        "a.yaml:2: unknown key 'data.puzzle.dificulty'; did you mean 'data.puzzle.difficulty'?",
    ),
    "value within": (
        "data: {puzzle: {easiest: 9}}\n",
        "a.yaml:1: data.puzzle.easiest: 9 is more than data.puzzle.difficulty 5 (data.puzzle.difficulty has its def",
    ),
    "list": ("model:\n  depth: [8]\n", "a.yaml:2: model.depth: expected one value, got a list"),
    "no value": ("data:\n  prompt:\n", "a.yaml:2: data.prompt: has no value"),
    "tag": ("run: {dir: !!python/name:os.system x}\n", "a.yaml:1: run.dir: tags such as"),
    "section is a value": ("model: 8\n", "a.yaml:1: model: expected keys and values, got '8'"),
    "file is a list": ("- model\n", "a.yaml:1: expected sections such as 'model:', got a list"),
    "list as key": ("[1]: 2\n", "a.yaml:1: expected a key, got a list"),
    "broken": ("model: {depth: 8\n", "a.yaml:2: not valid YAML: "),
    "tab": ("model:\n\tdepth: 8\n", "a.yaml:2: not valid YAML: "),
    "control character": ("run:\n  dir: a\x07\n", "a.yaml:2: not valid YAML: character #x0007"),
    "two documents": ("run: {seed: 1}\n---\nrun: {seed: 2}\n", "a.yaml:2: not valid YAML: "),
    "bad value": ("model:\n  sa_head_size: 33\n", "a.yaml:2: model.sa_head_size: 33 is odd"),
    "heads": ("model: {sa_heads: 8,\n  sa_kv_heads: 3}\n", "a.yaml:2: model.sa_kv_heads: 3 does not divide"),
    "against a default": ("model:\n  num_experts: 3\n", "a.yaml:2: model.experts_per_token: 4 is more than"),
    "across sections": ("training: {batch_size: 8}\nmesh: {data: 3}\n", "a.yaml:2: mesh.data: 3 devices do not divide"),
    "no number among several": ("mesh: {data: [4, x]}\n", "a.yaml:1: mesh.data: expected an integer, got 'x'"),
    "numbers in quotes": (
        'mesh: {data: "4"}\n',
        "a.yaml:1: mesh.data: expected integers such as 2 or [4, 4], got '4' in",
    ),
    "no numbers": ("mesh: {data: []}\n", "a.yaml:1: mesh.data: expected integers such as 2 or [4, 4], got an empty"),
    "an axis of nothing": ("mesh: {data: [4, 0]}\n", "a.yaml:1: mesh.data: (4, 0): every axis has one device or more"),
    "more devices than experts": (
        "training: {batch_size: 128}\nmesh: {expert: 128}\n",
        "a.yaml:2: mesh.expert: 128 devices can't divide the 64 experts of model.num_experts (model.num_ex",
    ),
    "negative": ("run: {seed: -1}\n", "a.yaml:1: run.seed: -1 is negative"),
    "zero": ("training: {steps: 0}\n", "a.yaml:1: training.steps: 0 is too small"),
    "too near zero": ("training: {epsilon: 1e-50}\n", "a.yaml:1: training.epsilon: float32 rounds 1e-50 to zero"),
    "too wide": ("recurrence: {draw: exponential, sigma: 30}\n", "a.yaml:1: recurrence.sigma: 30 is too large"),
    "too large": (
        "model: {depth: 3000000000}\n",
        "a.yaml:1: model.depth: 3000000000 is too large; it must be less than",
    ),
    "base missing": ("base: abc.yaml\n", "a.yaml:1: base: no such file"),
    "base by a name": ("base: la_tiny\n", "la_tiny'; the package's is "),
    "base is a list": ("base: [b.yaml]\n", "a.yaml:1: base: expected the path of one file"),
    "base is itself": ("\nbase: a.yaml\n", "a.yaml:2: base files form a cycle: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_file(tmp_path: Path, mistake: str) -> None:
    text, expected = MISTAKES[mistake]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    message = str(raised.value).replace(f"{tmp_path}/", "")
    assert expected in message
    assert message.startswith("a.yaml:")


@pytest.mark.parametrize(("written", "value"), [("2", (2,)), ("4,2", (4, 2)), ("[4, 4, 2]", (4, 4, 2))])
def test_several_integers_are_written_alike_everywhere(tmp_path: Path, written: str, value: tuple[int, ...]) -> None:
    batch = "training: {batch_size: 64}\n"
    text = f"[{written}]" if "[" not in written and "," in written else written
    assert load_config(write(tmp_path, f"{batch}mesh: {{data: {text}}}\n")).config.mesh.data == value
    assert load_config(write(tmp_path, batch), ["--mesh.data", written]).config.mesh.data == value


def test_a_mistake_in_the_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path, "model:\n  depth: x\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"b\.yaml:2: model\.depth"):
        load_config(write(tmp_path, "base: b.yaml\n"))


def test_a_longer_cycle(tmp_path: Path) -> None:
    write(tmp_path, "base: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"b\.yaml:1: base files form a cycle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(write(tmp_path, "base: b.yaml\n"))


def test_two_uses_of_one_base_are_no_cycle(tmp_path: Path) -> None:
    write(tmp_path, "run: {seed: 3}\n", "c.yaml")
    write(tmp_path, "base: c.yaml\n", "b.yaml")
    assert load_config(write(tmp_path, "base: b.yaml\n")).config.run.seed == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, "", "right.yaml")
    with pytest.raises(ConfigError, match=r"rihgt\.yaml: no such file; did you mean '.*right\.yaml'"):
        load_config(tmp_path / "rihgt.yaml")
    with pytest.raises(ConfigError, match="is a directory; name a YAML file"):
        load_config(tmp_path)
    write(tmp_path, "", "config.yaml")
    with pytest.raises(ConfigError, match=r"is a directory; its configuration is .*config\.yaml"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not a text file in UTF-8"):
        load_config(tmp_path / "binary.yaml")


OVERRIDES = {
    "unknown": (["--model.dpeth", "8"], "unknown option '--model.dpeth'; did you mean '--model.depth'?"),
    "hyphen": (["--data.on-error", "skip"], "unknown option '--data.on-error'; did you mean '--data.on_error'?"),
    "no section": (["--depth=8"], "unknown option '--depth'; did you mean '--model.depth'?"),
    "no value": (["--model.depth"], "--model.depth needs a value"),
    "no value, more options": (["--model.depth", "--run.seed", "1"], "--model.depth needs a value"),
    "unknown, no value": (["--resume"], "unknown option '--resume'; `dreamer train --help` lists every setting"),
    "no family": (["--model.family"], "--model.family needs a value"),
    "family twice": (["--model.family", "dreamer", "--model.family=dreamer"], "--model.family is given twice"),
    "twice": (["--run.seed", "1", "--run.seed=2"], "--run.seed is given twice"),
    "type": (["--model.depth", "eight"], "model.depth: expected an integer, got 'eight'"),
    "value": (["--model.da_head_size", "6"], "model.da_head_size: 6 is not divisible by 4"),
    "negative": (["--run.seed", "-1"], "run.seed: -1 is negative"),
    "stray": (["model.depth", "8"], "unexpected 'model.depth'"),
}


@pytest.mark.parametrize("mistake", OVERRIDES)
def test_mistakes_on_the_command_line(tmp_path: Path, mistake: str) -> None:
    words, expected = OVERRIDES[mistake]
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, ""), words)
    assert str(raised.value).startswith(f"command line: {expected}")


def test_a_clash_names_both_places(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  experts_per_token: 8\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["--model.num_experts", "4"])
    assert str(raised.value) == (
        f"{path}:2: model.experts_per_token: 8 is more than model.num_experts 4 "
        "(model.num_experts is from command line)"
    )
    assert raised.value.key == "model.experts_per_token"


def test_booleans_are_true_or_false() -> None:
    assert convert(bool, "a.b", "true") is True and convert(bool, "a.b", "false") is False
    with pytest.raises(ConfigError, match=r"a\.b: expected true or false, got 'yes'"):
        convert(bool, "a.b", "yes")


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        *(("trianing", "training"), ("trianing.log_evry", "training.log_every")),
        *(("model.lerning_rate", "training.learning_rate"), ("model.heads", "model.sa_heads")),
        *(("training.lr", "training.learning_rate"), ("training.max_steps", "training.steps")),
        *(("data.seq_len", "data.sequence_length"), ("training.epochs", None), ("model.x", None)),
    ],
)
def test_nearest_key(unknown: str, meant: str | None) -> None:
    assert nearest_key(unknown, DreamerConfig) == meant


def test_loading_imports_nothing_heavy() -> None:
    program = (
        "import sys; from dreamer_jax.config import load_config; "
        f"load_config({str(FOLDER / 'models' / 'dr_16.yaml')!r}, ['--model.depth', '8']); "
        "print(sorted({'jax', 'numpy', 'flax', 'tyro', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
