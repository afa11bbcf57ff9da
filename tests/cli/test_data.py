"""`dreamer data` and `dreamer bench data` through the real entry point."""

import json
from pathlib import Path

import pytest

from dreamer_jax.cli.main import main
from tests.data.preparing import problems, write_lines, write_mixture


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    write_lines(tmp_path / "a.jsonl", [*problems(60), b"broken\n"])
    return write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: {tmp_path}/a.jsonl}}}}")


def test_prepare_and_show(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["data", "prepare", str(mixture), "--out", out, "--workers=1"]) == 0
    printed = capsys.readouterr().out
    assert "  - broken: not JSON" in printed and "written 1 of 1" in printed and "Examples" not in printed
    words = ["--documents", "2", "--data.loss", "answer", "--data.sequence_length=512"]
    assert main(["data", "show", out, *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("-- row ") == 2 and "-- row 0, document 2: places " in shown
    lines = shown.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith("> <bos>")]
    texts = {p["question"]: p["answer"] for p in problems(60)}
    for start in starts:
        answer = texts[lines[start].removeprefix("> <bos>")].split("\n")
        assert lines[start + 1] == "> ", "the line break after the question is given, too"
        assert lines[start + 2 : start + 4] == [f"* {answer[0]}", f"* {answer[1]}<eos>"]
    assert main(["data", "show", out, *words, "--data.copies=2"]) == 0
    twice = capsys.readouterr().out
    assert "of 2 copies of each token the last" in twice
    assert twice[twice.index("\n-- row") :] == shown[shown.index("\n-- row") :]
    assert "16 batches: rows 8" in shown and "128 to 255" in shown and "#" * 40 in shown
    run_config = tmp_path / "run.yaml"
    run_config.write_text(f"model: {{vocab_size: 259}}\ndata: {{source: prepared, path: {out}, heldout_records: 5}}\n")
    assert main(["data", "show", str(run_config), "--documents=1"]) == 0
    all_trained = capsys.readouterr().out
    assert "5 held out" in all_trained and "* At the" not in all_trained.split("-- row")[0]
    assert "\n> <bos>\n* At the " in all_trained, "with loss on all, only the first token is given"


def test_train_tokenizer(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    out = tmp_path / "made" / "tokenizer.json"
    assert main(["data", "train-tokenizer", str(mixture), "--size", "300", "--out", str(out)]) == 0
    assert "300 ids" in capsys.readouterr().out and out.is_file()
    made = out.read_bytes()
    assert main(["data", "train-tokenizer", str(mixture), "--size", "290", "--out", str(out)]) == 2
    assert "exists; choose another name, or remove it first" in capsys.readouterr().err and out.read_bytes() == made
    assert main(["data", "train-tokenizer", str(mixture), "--size", "300", "--out", str(out / "below.json")]) == 2
    assert f"can't write {out / 'below.json'}: " in capsys.readouterr().err


def test_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorflow_datasets")
    write_lines(tmp_path / "a.jsonl", [*problems(5), {"question": "q"}])
    assert main(["data", "build", "gsm8k", "--out", str(tmp_path / "tfds"), "--from", str(tmp_path / "a.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "1 broken records are left out; the last problem: line 6 has no field 'answer'" in printed
    assert "dreamer_gsm8k/1.0.0: give it as the path" in printed
    write_lines(tmp_path / "b.jsonl", problems(7))
    assert main(["data", "build", "gsm8k", "--out", str(tmp_path / "tfds"), "--from", str(tmp_path / "b.jsonl")]) == 2
    assert "dreamer_gsm8k/1.0.0 is there already, perhaps of another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepair", "m.yaml"], "unknown action 'prepair'; did you mean 'data prepare'?"),
        (["prepare", "m.yaml"], "name the directory to fill: --out DIR"),
        (["prepare", "--out", "x"], "name one thing, not 0"),
        (["prepare", "m.yaml", "--oot", "x"], "unknown option '--oot'; did you mean '--out'?"),
        (["prepare", "m.yaml", "--out"], "--out needs a value"),
        (["prepare", "m.yaml", "--out", "x", "--workers", "none"], "--workers: expected a number above zero"),
        (["prepare", "m.yaml", "--out", "x", "--workers", "²"], "--workers: expected a number above zero, got '²'"),
        (["prepare", "m.yaml", "--out", "x"], "m.yaml: no such file"),
        (["show"], "name a configuration or a directory"),
        (["show", "."], "holds no index.json"),
        (["train-tokenizer", "m.yaml", "--size", "300"], "--out is missing"),
        (["train-tokenizer", "m.yaml", "--size", "300", "--out", "x.model"], "must end in .json"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dreamer: error: ") and message in error and "Traceback" not in error


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    assert "dreamer data prepare MIXTURE --out DIR" in capsys.readouterr().out


def test_bench(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mixture", str(mixture), "--workers", "1", "--steps", "3", "--sequence-length", "256"]
    assert main(["bench", "data", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prepare"]["records"] == 61 and 0 < found["pipeline"]["tokens"] <= 3 * 32 * 256
    assert all(found[name]["tokens_per_second"] > 0 for name in ("tokenizer", "prepare", "pipeline"))
    assert main(["bench", "data", "--megabytes", "1", "--workers", "1", "--steps", "1"]) == 0
    assert "tokens per CPU second" in capsys.readouterr().out
