"""Every command that README and docs show is run here, with small sizes in place of the real ones."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.config.models import VARIABLE
from dreamer_jax.data import open_data
from dreamer_jax.families import build, initialise
from dreamer_jax.families.puzzles import labels
from dreamer_jax.runs.folders import open_run
from dreamer_jax.runs.metrics import read_metrics
from tests.end_to_end.cases import programs_kept

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs/tutorial.md")  # a story of its own, told in order by tests/docs/test_tutorial.py

SMALL_RUN = {
    "model.depth": "2",
    "model.hidden_size": "32",
    "model.vocab_size": "259",
    "model.num_experts": "4",
    "model.experts_per_token": "2",
    "model.expert_size": "16",
    "training.steps": "2",
    "training.batch_size": "2",
    "data.sequence_length": "128",
    "data.heldout_records": "4",
    "data.difficulty": "2",
}
"""Takes the place of whatever a documented `dreamer train` or `dreamer bench train` says, as far as the family has such
settings."""
SMALL_OTHERS = {
    "model.head_size": "8",
    "model.mlp_size": "32",
    "model.core_layers": "1",
    "model.layers": "1",
    "model.scored": "2",
}
"""And of families other than Dreamer."""


def documented_commands() -> list[tuple[str, str]]:
    """(page, command) of every line of every ```bash block; a backslash at a line's end continues it."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command and not command.startswith("#"):
                    found.append((page.name, command))
    return found


COMMANDS = documented_commands()
DREAMER = sorted({command for _, command in COMMANDS if command.startswith("dreamer ")})
EXAMPLE = "looped.py"
"""The worked example of docs/add_family.md, as its commands name it."""
SCRIPTS = sorted({command for _, command in COMMANDS if command.startswith("bash launch/")})
COSTLY = ("dreamer train ", "dreamer bench train ", "dreamer bench generate ", "dreamer depth ")
OFTEN = (
    "dreamer train quickstart",
    "dreamer bench train --config la_tiny --against transformers",
)
"""The costly ones that every run of the tests goes through."""
OWN_TESTS = ("analyze", "convert", "data", "eval", "export", "frontier", "import", "plan", "serve", "study")
RUN_RUNS = ("README.md", "docs/inference.md", "docs/huginn.md", "docs/depth.md")
"""Pages whose Python needs no more than a run."""
ELSEWHERE = ("pip install ", "source ", "tensorboard ")
"""Set-up lines that the environment of the tests already stands for."""


def test_every_documented_command_is_of_a_kind_that_is_run():
    assert len(DREAMER) > 10 and "bash launch/quickstart.sh" in SCRIPTS
    left = [(page, c) for page, c in COMMANDS if c not in DREAMER and c not in SCRIPTS and not c.startswith(ELSEWHERE)]
    assert left == []


def with_options(words: list[str], options: dict[str, str]) -> list[str]:
    """The words with these options in place of the same ones, or added."""
    rest = list(words)
    for name, value in options.items():
        option = f"--{name}"
        if option in rest:
            rest[rest.index(option) + 1] = value
        else:
            rest += [option, value]
    return rest


def small_for(words: list[str]) -> dict[str, str]:
    """What of the small settings the family of a command's configuration has."""
    named = words[words.index("--config") + 1] if "--config" in words else words[1]
    model = load_config(named).config.model
    fields = {f"model.{field.name}" for field in dataclasses.fields(model)}
    small = SMALL_RUN | SMALL_OTHERS
    return {key: value for key, value in small.items() if not key.startswith("model.") or key in fields}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Many commands come to the same small model: what one of them has compiled is there for the others."""
    with programs_kept(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def huginn(tmp_path_factory):
    """A finished run of that family."""
    directory = str(tmp_path_factory.mktemp("runs") / "huginn")
    words = ["train", "huginn/tiny"]
    words = with_options(words, small_for(words))
    assert main([*words, "--run.dir", directory]) == 0
    return directory


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder as the documentation assumes it: nothing of the checkout, and a file my.jsonl."""
    records = [
        {"question": f"{a} plus {b}?", "answer": str(a + b), "text": "some text"} for a in range(9) for b in range(9)
    ]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run that stands for every `runs/...` of the documentation."""
    directory = str(tmp_path_factory.mktemp("runs") / "run")
    words = with_options(["train", "quickstart"], SMALL_RUN | {"evaluation.harder": "0"})
    assert main([*words, "--run.dir", directory]) == 0
    return directory


def slow_if_costly(command: str) -> Any:
    """Each is another program to compile: with `-m slow` but for two of them."""
    costly = command.startswith(COSTLY) and command not in OFTEN and EXAMPLE not in command
    return pytest.param(command, marks=[pytest.mark.slow] if costly else [])


def test_documented_settings_exist(workplace):
    """Of those too that are run with `-m slow` only; a reader's own file has no name in the package."""
    trainings = [words for words in map(shlex.split, DREAMER) if words[1] == "train" and ".yaml" not in words[2]]
    assert len(trainings) > 20
    for words in trainings:
        load_config(words[2], words[3:])


@pytest.mark.parametrize("page", sorted({page for page, command in COMMANDS if command.startswith("dreamer train ")}))
def test_documented_trainings_follow_each_other(page, workplace):
    """In a page's order, by a reader who has the quick start's run: none is refused as another run of its folder."""
    assert open_run(load_config("quickstart")).local == Path("runs/quickstart")
    for words in (
        shlex.split(command)[2:] for its, command in COMMANDS if its == page and command.startswith("dreamer train ")
    ):
        if ".yaml" not in words[0] and EXAMPLE not in words:
            open_run(load_config(words[0], words[1:]))


@pytest.mark.parametrize("command", map(slow_if_costly, DREAMER))
def test_documented_command(command, workplace, trained, capsys):
    words = shlex.split(command)[1:]
    if words[0] in ("checkpoint", "compare", "depth", "embed", "generate"):
        words = [trained if word.startswith("runs/") else word for word in words]
    if "--training.initial_weights" in words:
        words = with_options(words, {"training.initial_weights": trained})
    if EXAMPLE in words:
        pytest.skip("run in order by the test of the worked example")
    if words[0] in OWN_TESTS or "prepared" in words or words[:2] in (["bench", "samplers"], ["bench", "serve"]):
        pytest.skip("run by that command's own tests: needs prepared data, an exported folder or a run with Chromium")
    if words[0] == "train" or words[:2] in (["bench", "train"], ["bench", "generate"], ["bench", "export"]):
        small = small_for(words)
        if "jsonl" in command or "gsm8k" in command:
            small |= {"data.source": "jsonl", "data.path": "my.jsonl", "data.tokenizer": "bytes"}
            small |= {"evaluation.harder": "0", "training.warmup_steps": "1", "training.cooldown_steps": "0"}
        elif words[0] == "train":
            small["evaluation.harder"] = "3"
        if "trapezoid" in words:
            small |= {"training.warmup_steps": "1", "training.cooldown_steps": "1"}
        if "--recurrence.least" in words:
            small["recurrence.least"] = "2"
        if "LA" in words:
            small["model.num_experts"] = "4"
        if "--data.knowledge" in words:
            assert main(["embed", trained, "my.jsonl", "--out", "knowledge.safetensors"]) == 0
            small |= {"model.pa_embedding_size": "32", "model.pa_slots": "81"}
        if words[0] == "bench":
            if "--against" in words or words[1] == "export":
                pytest.importorskip("transformers", reason="the peer of the benchmark, extra `bench`")
            small = {k: v for k, v in small.items() if not k.startswith("data.") or k == "data.sequence_length"}
            small |= {"steps": "2"} if words[1] == "train" else {"tokens": "3", "prompt-tokens": "5", "rounds": "1"}
        words = with_options(words, small)
    if "--write" in words:
        words[words.index("--write") + 1] = str(workplace / "family")
    assert main(words) == 0
    assert capsys.readouterr().out


def documented_python(page: str) -> list[str]:
    """The ```python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow_but("README.md", "depth.md", "huginn.md")
@pytest.mark.parametrize("page", RUN_RUNS)
def test_documented_python(page, workplace, trained, huginn, capsys):
    """The blocks of a page, one after the other, as in a notebook."""
    (workplace / "runs").mkdir()
    (workplace / "runs" / "quickstart").symlink_to(trained)
    (workplace / "runs" / "huginn_tiny").symlink_to(huginn)
    names: dict = {}
    blocks = documented_python(page)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert names["logits"].shape[-1] == 259 and names["states"].shape[0] in (3, 13, 17)


def test_every_python_block_is_run():
    elsewhere = {
        f"docs/{name}.md"
        for name in ("add_family", "data", "depth_recurrent", "evaluation", "export", "finetune", "samplers", "serving")
    }
    there = {str(page.relative_to(ROOT)) for page in PAGES if documented_python(str(page.relative_to(ROOT)))}
    assert there == {*RUN_RUNS, *elsewhere}


def test_documented_sampler(huginn):
    """At an angle that no step keeps within it is static; at one that every step does, tokens stop after the first."""
    model = dreamer_jax.load(huginn)
    names: dict = {"model": model}
    (block,) = documented_python("docs/samplers.md")
    exec(compile(block, "samplers.md", "exec", dont_inherit=True), names)  # whose annotations are no strings
    whole, never, always = (
        model.generate("((T&F)|T)=", max_tokens=6, sampler=sampler)[0]
        for sampler in (None, names["Settled"](0.0), names["Settled"](181.0))
    )
    assert whole.tokens == never.tokens and whole.mean_depth == never.mean_depth == model.family.depth
    rest = len(always.tokens) - 1  # the first comes of the prompt, which goes through all depths
    assert rest and always.mean_depth == (model.family.depth + rest) / (rest + 1)


def test_documented_python_of_data(workplace):
    words = [f"--{key}={value}" for key, value in SMALL_RUN.items()]
    names = {"open_data": open_data, "config": load_config("quickstart", words).config}
    names |= {"process": 0, "processes": 2, "start": 3, "stop": 5}
    (block,) = documented_python("docs/data.md")
    exec(compile(block, "data.md", "exec"), names)
    assert names["step"] == 4 and names["batch"]["tokens"].shape == (1, 128)


def test_documented_python_of_puzzles(workplace):
    words = ["--model.hidden_size=16", "--model.heads=2", "--model.mlp_size=16", "--training.batch_size=4"]
    config = load_config("graph_laptop", words).config
    family = build(config.model)
    params, model_state = initialise(family, jax.random.key(0))
    _, batch = next(iter(open_data(config).training_batches(0, 1)))
    names = {"family": family, "params": params, "model_state": model_state, "batch": batch, "labels": labels(batch)[0]}
    (block,) = documented_python("docs/depth_recurrent.md")
    exec(compile(block, "depth_recurrent.md", "exec"), names)
    assert names["logits"].shape == (20, 4, 2) and names["accuracy"].shape == (20,)


def test_every_metric_is_explained(trained, huginn):
    """By name on docs/training.md, or by its beginning and its end: `experts/<router>/used`, `/gini`."""
    page = (ROOT / "docs/training.md").read_text()
    keys = {key for run in (trained, huginn) for record in read_metrics(Path(run)) for key in record} - {"step"}
    assert {"depth", "recurrences", "heldout/loss"} <= keys
    for key in keys:
        whole, parts = f"`{key}`" in page, key.split("/")
        assert whole or (len(parts) > 1 and f"`{parts[0]}/" in page and f"/{parts[-1]}`" in page), key


def test_the_worked_example_of_a_family(workplace, monkeypatch, capsys):
    """The module and the commands of docs/add_family.md, as they stand there: counted twice with one result, trained,
    generating what its whole pass says."""
    monkeypatch.setenv(VARIABLE, "")
    (module,) = documented_python("docs/add_family.md")
    (workplace / EXAMPLE).write_text(module)
    _, _, configuration = (ROOT / "docs/add_family.md").read_text().partition("```yaml\n")
    (workplace / "looped.yaml").write_text(configuration.partition("```")[0])
    said = {}
    for command in [command for _, command in COMMANDS if EXAMPLE in command]:
        words = shlex.split(command)[1:]
        short = ["--training.steps", "2", "--training.warmup_steps", "1"] if words[0] == "train" else []
        assert main([*words, *short]) == 0
        said[words[0]] = capsys.readouterr().out
    assert list(said) == ["budget", "train", "generate"]
    assert "parameters (+0)" in said["budget"] and "(+0.0000 %)" in said["budget"]
    model = dreamer_jax.load("runs/looped")
    assert next(its["loss"] for its in read_metrics(Path("runs/looped")) if "loss" in its) < 8, "log 259 is 5.6"
    row = model.encode("!(T&F)=")
    for token in model.generate([row], max_tokens=4)[0].tokens:
        assert token == int(model.logits([row])[0, -1].argmax())
        row.append(token)


def test_quickstart_script_trains_and_is_safe_to_repeat(tmp_path):
    small = with_options([], SMALL_RUN | {"evaluation.harder": "3", "run.dir": str(tmp_path / "run")})
    environment = os.environ | {"DREAMER_VENV": sys.prefix, "PYTHON": sys.executable}
    for expected in ("step 2/2", "complete"):
        done = subprocess.run(
            ["bash", str(ROOT / "launch/quickstart.sh"), *small], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout and "what to try next" in done.stdout
    assert (tmp_path / "run" / "figures" / "accuracy.png").stat().st_size > 1000
