"""The real `dreamer`: exit codes, one message without a traceback, quick help."""

import contextlib
import errno
import gc
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from dreamer_jax import __version__
from dreamer_jax.cli import main as entry
from dreamer_jax.cli.main import COMMANDS, main
from dreamer_jax.config import Config, load_config
from dreamer_jax.config.models import VARIABLE
from dreamer_jax.configs import FOLDER
from dreamer_jax.errors import UserError
from dreamer_jax.training.console import Console

ROOT = Path(__file__).resolve().parents[2]
TINY = str(FOLDER / "models" / "la_tiny.yaml")
TOY = str(ROOT / "tests" / "config" / "toy_family.py")


@pytest.fixture(autouse=True)
def no_family_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` leaves it in the environment; put back after each test."""
    monkeypatch.setenv(VARIABLE, "")


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
        (["config"], "config: list, show or check?\nusage: dreamer config list"),
        (["config", "chek", TINY], "config: unknown action 'chek'; did you mean 'config check'?"),
        (["config", "show"], "config show: no configuration is named"),
        (["config", "check", TINY, "--data.source", "jsonl"], "command line: data.path: is empty"),
        (["config", "check", TINY, "--data.tokenizer", "no.model"], "command line: data.tokenizer: no such file"),
        (
            ["config", "check", TINY, "--data.source=jsonl", "--data.path=no.jsonl"],
            "command line: data.path: no such file 'no.jsonl'",
        ),
        (
            ["config", "check", TINY, "--model.vocab_size", "10"],
            "model.vocab_size: 10 is too small for tokenizer bytes",
        ),
        (
            ["config", "check", TINY, "--evaluation.tasks", "foo"],
            "evaluation.tasks: 'foo' is not a task; choose from gsm8k",
        ),
        (["config", "check", TINY, "--data.difficulty", "100"], "data.difficulty: 100 is more than"),
        (["config", "check", "zoo"], "zoo is a study; `dreamer study zoo --plan` checks it"),
        (["config", "check", "gsm8k_math"], "gsm8k_math is a mixture; `dreamer data prepare gsm8k_math` checks it"),
        (["match", "dr_tiny", "--to", "la_tiny", "--variants", "LA"], "match: --variants are of --family"),
        (["budget", "la_tiny", "--devices", "8"], "budget: --devices goes with --program"),
        (["train", TINY, "--coordinator"], "train: --coordinator needs a value"),
        (["train", TINY, "--coordinator", "--processes", "2"], "train: --coordinator needs a value"),
        (["train", TINY, "--processes", "2", "--processes=4"], "train: --processes is given twice"),
        (
            ["generate", "runs/x", "--prompt", "x", "--max-tokens", "99999999999"],
            "'99999999999' is more than 2,147,483,647",
        ),
        (["generate", "runs/x", "--prompt", "a", "--prompt=b"], "--prompt is given twice; remove one"),
        (["checkpoint", "prune", "x", "--keep", "1", "--keep", "2"], "--keep is given twice; remove one"),
        (["info", "--all"], "info: unexpected '--all'"),
        (["info", "--family-module"], "--family-module needs a value: toy.py or package.module"),
        (["info", "--family-module="], "--family-module needs a value: toy.py or package.module"),
        (["--family-module", "--version"], "--family-module needs a value: toy.py or package.module"),
        (["info", "--family-module", "a.py", "--family-module="], "--family-module needs a value"),
        (["data", "show", "--family-module", "no.py"], "--family-module no.py: no such file; name a .py file"),
        (["train", TINY, "--model.family", "toy"], "command line: model.family: unknown family 'toy' (known: "),
        (
            ["train", TINY, "--model.family", "toy", "--family-module", TOY],
            "la_tiny.yaml:3: 'model.variant' is a setting of famil",
        ),
    ],
)
def test_mistakes(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.err.startswith("dreamer: error: ") and expected in output.err
    assert output.out == ""


def test_no_command_shows_what_people_do_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert len([line for line in said.splitlines() if line.startswith("dreamer ")]) == 5
    assert "`dreamer --help`" in said


def test_errors_of_the_disk_are_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Also those that a command hasn't foreseen; other errors of the system are defects."""
    command = ModuleType("command")
    monkeypatch.setitem(sys.modules, "command", command)
    monkeypatch.setitem(COMMANDS, "info", ("command", ""))
    (tmp_path / "file").write_text("")
    command.run = lambda _: (tmp_path / "file" / "below").mkdir()  # type: ignore[attr-defined]
    assert main(["info"]) == 2
    assert capsys.readouterr().err == f"dreamer: error: {tmp_path}/file/below: Not a directory; name another place\n"

    said = {errno.ENOSPC: "No space left on device; make room", errno.EFBIG: "File too large; raise the limit of"}
    for number, line in said.items():

        def fails(_: list[str], number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        command.run = fails  # type: ignore[attr-defined]
        assert main(["info"]) == 2
        assert f"error: {line}" in capsys.readouterr().err
    command.run = lambda _: (tmp_path / "nothing").read_text()  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        main(["info"])


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


def settings_in_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[set[str], str]:
    """(the settings that a help names, its text on one line)."""
    assert main([*words, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    return {word.removeprefix("--") for word in text.split() if word.startswith("--") and "." in word}, text


def test_help_is_that_of_the_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dreamer_keys, text = settings_in_help(["train"], capsys)
    assert {"model.family", "model.num_experts", "run.seed"} <= dreamer_keys and "model.laps" not in dreamer_keys
    families = text.partition("Families of models: ")[2].partition(".")[0].split(", ")
    assert "dreamer" in families and "toy" not in families
    toy_file = tmp_path / "toy.yaml"
    toy_file.write_text("model: {family: toy, laps: 77}\nrun: {seed: 13}\n")
    for words, laps, seed in [
        (["config", "show", "--model.family", "toy"], 4, 0),
        (["train", "--model.family=toy", "--run.seed", "5"], 4, 0),
        (["train", TINY, "--model.family", "toy"], 4, 0),
        (["train", str(toy_file)], 77, 13),
    ]:
        keys, text = settings_in_help(["--family-module", TOY, *words], capsys)
        assert {"model.family", "model.laps", "run.seed"} <= keys and "model.num_experts" not in keys
        assert f"How often a toy goes round. (default: {laps})" in text and f"metrics. (default: {seed})" in text
        assert "Toys, which go round and round." in text
        listed = text.partition("Families of models: ")[2].partition(".")[0].split(", ")
        assert {"dreamer", "toy"} <= set(listed)
    other_keys, _ = settings_in_help(["train", str(toy_file), "--model.family", "dreamer"], capsys)
    assert other_keys == dreamer_keys


def test_help_of_an_option_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "--family-module", TOY, "--model.family", "toy"]) == 0
    assert "--model.laps" in capsys.readouterr().out
    assert main(["train", "--help", "--model.family", "draemer"]) == 2
    assert "command line: model.family: unknown family 'draemer'; did you mean" in capsys.readouterr().err


def test_family_module_is_handed_to_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(Path(TOY).read_text())
    for given, left in (("mine.py", str(tmp_path / "mine.py")), ("tests.config.toy_family", "tests.config.toy_family")):
        for words in (["info", "--family-module", given], [f"--family-module={given}", "info"]):
            seen = []
            monkeypatch.setenv(VARIABLE, "")
            with monkeypatch.context() as patch:
                replace_command(patch, lambda arguments, seen=seen: seen.append(arguments) or 0)
                assert main(words) == 0
            assert seen == [[]] and os.environ[VARIABLE] == left


@pytest.mark.slow  # tests/end_to_end/test_outside_family.py trains one
def test_a_family_from_outside_through_the_process(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    words = ["config", "show", str(empty), "--model.family", "toy"]
    whole = str(ROOT / "tests" / "families" / "toy.py")
    done = dreamer(*words, "--family-module", "tests/families/toy.py")
    assert done.stdout.startswith("model:\n  family: toy  # command line\n  depth: 4  # default\n")
    saved = tmp_path / "config.yaml"
    saved.write_text(done.stdout)
    again = dreamer("config", "check", str(saved), env=os.environ | {VARIABLE: whole})
    assert again.stdout.startswith("ok\n  model    toy, hidden size 32, vocabulary 259, float32\n")
    without = dreamer("config", "check", str(saved))
    assert without.returncode == 2
    assert without.stderr.startswith(f"dreamer: error: {saved}:2: model.family: unknown family 'toy' (known: ")


def test_the_second_start_keeps_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--family-module", TOY, "train", TINY]
    started = []
    monkeypatch.setattr(sys, "argv", ["dreamer", *words])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=3")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setattr(entry, "main", lambda: 0)
    monkeypatch.setattr(entry.interrupts, "prepare", lambda: None)  # this process has tests of Ctrl-C of its own
    monkeypatch.setattr(entry.program_cache, "settings", dict)  # they would stay in this process's environment
    monkeypatch.setattr(entry.gc, "set_threshold", lambda _: None)
    entry.entry()
    assert [arguments[3:] for arguments in started] == [words]
    # What somebody has set himself comes last, which glibc takes; and with it there is no third start.
    assert os.environ["GLIBC_TUNABLES"].endswith(f"trim_threshold={1 << 40}:glibc.malloc.arena_max=3")
    entry.entry()
    assert len(started) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="there is one start only")
def test_a_module_in_the_working_directory_is_not_taken_for_an_installed_one(tmp_path: Path) -> None:
    """Neither by the first start nor by the second."""
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not the package')")
    command = Path(sys.executable).parent / "dreamer"
    found = subprocess.run(
        [command, "bench", "generate", "--config", "nothing"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and found.stderr.startswith("dreamer: error: nothing"), found.stderr


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
    for error in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")):
        replace_command(monkeypatch, raising(error))
        assert main(["info"]) == 2
        said = capsys.readouterr().err
        assert "there isn't the memory for what is asked; ask for less" in said and said.count("\n") == 1
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
    for error in (
        ValueError("a defect"),
        RuntimeError("INTERNAL: a defect"),
        ModuleNotFoundError("no module", name="dreamer_jax.no_such_room"),
    ):
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


def test_commands_that_compile_look_for_cycles_seldom(monkeypatch):
    """Tracing makes hundreds of thousands of objects, which Python would look through again and again."""
    before = gc.get_threshold()
    for name, value in (("main", lambda: 0), ("HEAVY", [])):
        monkeypatch.setattr(entry, name, value)
    monkeypatch.setattr(entry.interrupts, "prepare", lambda: None)
    monkeypatch.setattr(entry.program_cache, "settings", dict)
    monkeypatch.setattr(sys, "argv", ["dreamer", "generate"])
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # as it was before; what `entry` sets mustn't reach later tests' children
    try:
        assert entry.entry() == 0 and gc.get_threshold()[0] == entry.SELDOM
    finally:
        gc.set_threshold(*before)


BY_ROW = ["--recurrence.by", "row", "--recurrence.draw", "uniform"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *(("quickstart", words) for words in (["--training.trainable", "heads"], BY_ROW)),
        ("quickstart", [*BY_ROW, "--recurrence.steps", "0", "--recurrence.groups", "3"]),
        ("huginn/tiny", ["--model.draw_by", "row", "--model.row_groups", "3", "--data.source", "task"]),
    ],
)
def test_settings_without_a_meaning_for_the_model_leave_no_directory(config, words, tmp_path, capsys):
    """It would refuse the mended ones: another configuration."""
    folder = tmp_path / "run"
    assert main(["config", "check", config, *words]) == 2
    assert main(["train", config, *words, "--run.dir", str(folder)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(words[0].strip("-").partition(".")[0] in line for line in errors)
    assert not folder.exists()


def test_a_study_of_somebodys_own_is_shown_as_it_is_on_any_terminal(tmp_path):
    """In a process of its own, to a terminal without the characters that it has."""
    path = tmp_path / "own.yaml"
    path.write_text("# größer\nbaseline: a\nmembers: {a: }\ntasks: {t: {tokens: 1}}\n", encoding="utf-8")
    command = [sys.executable, "-m", "dreamer_jax", "config", "show", str(path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[0] == b"# gr??er", done.stderr


def test_a_log_that_finds_no_room_ends_no_run():
    """Its disk may be full; a closed pipe ends a command as ever. What finds room later is written then."""
    console = Console(Config())
    with open("/dev/full", "w") as console._out.file:
        for _ in range(3):
            console.say("a line")
        with contextlib.suppress(OSError):
            console._out.file.close()
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError), os.fdopen(writing, "w", buffering=1) as console._out.file:
        console.say("a line")
