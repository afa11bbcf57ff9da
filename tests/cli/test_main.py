"""The real `dreamer`: exit codes, one message without a traceback, quick help."""

import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dreamer_jax import __version__
from dreamer_jax.cli import main as entry
from dreamer_jax.cli.main import COMMANDS, main
from dreamer_jax.config import load_config
from dreamer_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "models" / "la_tiny.yaml")


def dreamer(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dreamer_jax", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )


def replace_command(monkeypatch: pytest.MonkeyPatch, run) -> None:
    """Make `dreamer info` call `run`."""
    monkeypatch.setattr(entry.importlib, "import_module", lambda name: type("module", (), {"run": staticmethod(run)}))


def raising(error: BaseException):
    def run(arguments: list[str]) -> int:
        raise error

    return run


@pytest.fixture
def bad_file(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("model:\n  depth: 4\n  dpeth: 8\n")
    return path


def test_bad_file_through_the_process(bad_file: Path) -> None:
    done = dreamer("train", str(bad_file))
    assert done.returncode == 2
    assert done.stderr == (f"dreamer: error: {bad_file}:3: unknown key 'model.dpeth'; did you mean 'model.depth'?\n")


def test_bad_option_through_the_process() -> None:
    done = dreamer("train", TINY, "--training.step", "3")
    assert done.returncode == 2
    assert done.stderr == (
        "dreamer: error: command line: unknown option '--training.step'; did you mean '--training.steps'?\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian", TINY], "unknown command 'trian'; did you mean 'train'?"),
        (["zzzz"], "unknown command 'zzzz'; one of: train, checkpoint, data, config"),
        (["--verison"], "unknown option '--verison'; did you mean '--version'?"),
        (["train"], "train: no configuration is named; usage: dreamer train CONFIG"),
        (["train", TINY, "model.depth", "8"], "train: unexpected 'model.depth'"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", TINY, "--model.experts_per_token", "17"], "model.experts_per_token: 17 is more than"),
        (["config"], "config: show or check?\nusage: dreamer config show CONFIG"),
        (["config", "chek", TINY], "config: unknown action 'chek'; did you mean 'config check'?"),
        (["config", "show"], "config show: no configuration is named"),
        (["config", "check", TINY, "--data.source", "jsonl"], "command line: data.path: is empty"),
        (["config", "check", TINY, "--data.tokenizer", "no.model"], "command line: data.tokenizer: no such file"),
        (
            ["config", "check", TINY, "--data.source=jsonl", "--data.path=no.jsonl"],
            "command line: data.path: no such file 'no.jsonl'",
        ),
        (["info", "--all"], "info: unexpected '--all'"),
    ],
)
def test_mistakes(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.err.startswith("dreamer: error: ") and expected in output.err
    assert output.out == ""


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_help_is_quick_and_lists_every_command() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = dreamer("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.5


def test_every_command_has_its_module() -> None:
    assert [module for module, _ in COMMANDS.values() if find_spec(module) is None] == []


def test_version() -> None:
    assert dreamer("--version").stdout == f"dreamer-jax {__version__}\n"


def test_train_help_shows_docstrings_and_the_values_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TINY, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--data.on_error {stop,skip}" in text
    assert "h: size of the residual stream. (default: 256)" in text


def test_show_prints_a_configuration_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--model.depth", "3", TINY]) == 0
    text = capsys.readouterr().out
    assert "  depth: 3  # command line\n" in text and f"  hidden_size: 256  # {TINY}:5\n" in text
    saved = tmp_path / "saved.yaml"
    saved.write_text(text)
    assert load_config(saved).config == load_config(TINY, ["--model.depth=3"]).config


def test_check_says_ok_and_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", TINY]) == 0
    output = capsys.readouterr().out
    assert output.startswith("ok\n")
    assert "LA, depth 8" in output and "8 x 256 = 2048 tokens" in output


def test_train_hands_over_the_loaded_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    loop = type(sys)("dreamer_jax.training.loop")
    loop.Extras = lambda *_: None  # type: ignore[attr-defined]
    loop.train = lambda loaded, extras: seen.append(loaded) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dreamer_jax.training", type(sys)("dreamer_jax.training"))
    monkeypatch.setitem(sys.modules, "dreamer_jax.training.loop", loop)
    assert main(["train", TINY, "--run.seed=5"]) == 7
    assert seen == [load_config(TINY, ["--run.seed=5"])]


def test_user_errors_and_interrupts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_command(monkeypatch, raising(UserError("the disk is full; free some space")))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "dreamer: error: the disk is full; free some space\n"
    replace_command(monkeypatch, raising(KeyboardInterrupt()))
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "dreamer: interrupted\n"


def test_a_missing_dependency_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dreamer_jax.cli.extras.requirements", lambda: {"": ["PyYAML"], "eval": ["lm-eval"]})
    replace_command(monkeypatch, raising(ModuleNotFoundError("no module", name="lm_eval.api")))
    assert main(["info"]) == 2
    assert "the package lm_eval is not installed; in the checkout: pip install -e '.[eval]'" in capsys.readouterr().err


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("a defect"), ModuleNotFoundError("no module", name="dreamer_jax.no_such_room")):
        replace_command(monkeypatch, raising(error))
        with pytest.raises(type(error)):
            main(["info"])


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dreamer_jax", "config", "show", TINY],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
