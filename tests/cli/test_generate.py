"""What `dreamer generate` and `dreamer chat` print, with a model that repeats its prompt."""

from __future__ import annotations

import io
import json
import os
from types import SimpleNamespace

import pytest

from dreamer_jax.cli import chat, generate
from dreamer_jax.cli.main import main
from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Generated, Text, Trace
from dreamer_jax.inference.tracing import Cell


class Echo:
    """Answers a prompt with `<prompt>`."""

    exits_early, drafts = True, False

    def generate(self, prompts, max_tokens, sampling, stop, numbers):
        return [Text(f"<{prompt}>{i}", [7, 8, 9], "stop", 2.5, 4) for i, prompt in zip(numbers, prompts, strict=True)]

    def stream(self, prompts, max_tokens, sampling, stop):
        answer = f"<{prompts[0]}>"
        for end in range(1, len(answer) + 1):
            yield [Text(answer[:end], [7] * end, "length", 2.0)]


@pytest.fixture(autouse=True)
def run(monkeypatch):
    config = SimpleNamespace(data=SimpleNamespace(prompt="Q: {question}\nA: ", source="jsonl"))
    for command in (generate, chat):
        monkeypatch.setattr(command, "open_model", lambda options, sampler: (Echo(), config))
    return config


def test_a_prompt_is_continued_once(capsys):
    assert main(["generate", "runs/x", "--prompt", "two\nlines"]) == 0
    assert capsys.readouterr().out == "<two\nlines>\n"


def test_a_file_gives_a_line_for_each_record(tmp_path, capsys):
    records = [{"prompt": "p", "id": 1}, {"question": "why?"}, {"prompt": "last"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["generate", "runs/x", "--file", str(path), "--batch-size", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["generated"] for line in lines] == ["<p>0", "<Q: why?\nA: >1", "<last>2"]
    counted = {"finish": "stop", "tokens": 3, "mean_depth": 2.5, "steps": 4}
    assert lines[0] == {"prompt": "p", "id": 1, "generated": "<p>0", **counted}


class Failing(Echo):
    """Has no token to choose after the first."""

    def generate(self, prompts, max_tokens, sampling, stop, numbers):
        return [
            Text(prompt, [7], "failed" if n == 1 else "stop", 2.0) for n, prompt in zip(numbers, prompts, strict=True)
        ]

    def stream(self, prompts, max_tokens, sampling, stop):
        yield [Text("a", [7], "failed", 2.0)]


def test_logits_that_are_no_numbers_are_said(run, monkeypatch, tmp_path, capsys):
    """The other records of a file are answered all the same, and a chat goes on."""
    for command in (generate, chat):
        monkeypatch.setattr(command, "open_model", lambda options, sampler: (Failing(), run))
    assert main(["generate", "runs/x", "--prompt", "p"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "a\n" and "error: after 1 tokens the model's logits are NaN or infinite" in shown.err
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "p"}\n' * 3)
    assert main(["generate", "runs/x", "--file", str(path), "--batch-size", "1"]) == 2
    shown = capsys.readouterr()
    assert [json.loads(line)["finish"] for line in shown.out.splitlines()] == ["stop", "failed", "stop"]
    assert "error: 1 of 3 texts: after 1 tokens the model's logits are" in shown.err
    monkeypatch.setattr("sys.stdin", io.StringIO("q\nr\n"))
    assert main(["chat", "runs/x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "a\n\n" * 2 and shown.err.count("NaN or infinite") == 2


def test_chat_fills_the_prompt_of_the_run_and_keeps_the_history_when_asked(monkeypatch, capsys):
    for extra, second in (([], "<Q: b\nA: >"), (["--history"], "<Q: a\nA: <Q: a\nA: >\nQ: b\nA: >")):
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))  # nothing to answer in an empty line
        assert main(["chat", "runs/x", *extra]) == 0
        assert capsys.readouterr().out == f"<Q: a\nA: >\n\n{second}\n\n"


def test_a_line_that_is_no_text_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\udcff\nb\n"))  # as Python reads the byte ff
    assert main(["chat", "runs/x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "<Q: a\nA: >\n\n<Q: b\nA: >\n\n" and "isn't text in UTF-8" in shown.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\nb\n"), "utf-8", "strict"))
    assert main(["chat", "runs/x"]) == 0
    assert capsys.readouterr() == shown
    monkeypatch.setattr("sys.stdin", None)  # as Python has it of a process without one
    assert main(["chat", "runs/x"]) == 2
    assert "there is no input to read lines from" in capsys.readouterr().err


def test_a_template_without_fields_makes_no_prompts(run, tmp_path, capsys):
    run.data.prompt = ""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": ""}\n{"text": "a"}\n')
    assert main(["generate", "runs/x", "--file", str(path)]) == 2
    assert "line 2: it has no field prompt" in capsys.readouterr().err


def test_questions_of_built_in_tasks_are_prompts_as_they_are(run, monkeypatch, capsys):
    run.data.source = "task"
    monkeypatch.setattr("sys.stdin", io.StringIO("(T|F)=\n"))
    assert main(["chat", "runs/x"]) == 0
    assert capsys.readouterr().out == "<(T|F)=>\n\n"


def test_ctrl_c_stops_an_answer_on_a_terminal_and_the_chat_goes_on(monkeypatch, capsys):
    def stream(self, prompts, max_tokens, sampling, stop):
        yield [Text("half an", [7, 8], "length", 2.0)]
        if "long" in prompts[0]:
            raise KeyboardInterrupt
        yield [Text("half an answer", [7, 8, 9], "length", 2.0)]

    monkeypatch.setattr(Echo, "stream", stream)
    terminal = io.StringIO("long\nb\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["chat", "runs/x"]) == 0
    assert capsys.readouterr().out == "> half an\n> half an answer\n> "
    monkeypatch.setattr("sys.stdin", io.StringIO("long\nb\n"))
    assert main(["chat", "runs/x"]) == 130


def test_a_trace_is_drawn(monkeypatch, tmp_path, capsys):
    def trace(self, prompt, max_tokens, sampling, stop):
        return Text("ab", [1, 2], "length", 1.0), Trace([0], Generated([1, 2], [1, 1]), [Cell(0, 1, 1, 0, 1, 2)])

    monkeypatch.setattr(Echo, "trace", trace, raising=False)
    monkeypatch.setattr(Echo, "tokenizer", ByteTokenizer(), raising=False)
    path = tmp_path / "t.svg"
    assert main(["generate", "runs/x", "--prompt", "a", "--trace", str(path), "--sampler", "lossless"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "ab\n" and str(path) in shown.err
    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "runs/x", "--prompt", "a", "--trace", "t.pdf"], "must end in .png or .svg"),
        (["generate", "runs/x", "--prompt", "a", "--trace", "no/t.svg"], "there is no folder no"),
        (["generate", "runs/x", "--file", "p.jsonl", "--trace", "t.svg"], "give it with --prompt"),
        (["generate", "runs/x"], "nothing to continue"),
        (["generate", "runs/x", "--file", "missing.jsonl"], "no such file"),
        (["generate", "runs/x", "--file", "."], "is a folder"),
        (["generate", "runs/x", "--prompt", "a\udcff"], "--prompt: isn't text in UTF-8"),
        (["generate", "runs/x", "--prompt", "a", "--top-p", "2"], "top_p"),
        (["generate", "runs/x", "--prompt", "a", "--batch-size", "0"], "--batch-size"),
        (["generate", "runs/x", "--prompt", "a", "--tempreature", "1"], "--help"),
        (["chat"], "RUN"),
    ],
)
def test_mistakes_are_explained(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"id": 1}', "question"),
        ('{"prompt": 3}', "not a text"),
        (r'{"prompt": "a\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "x": 1e400}', "a number that JSON has not"),
    ],
)
def test_broken_records_are_named_by_line(tmp_path, line, message, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    assert main(["generate", "runs/x", "--file", str(path)]) == 2
    error = capsys.readouterr().err
    assert "line 2" in error and message in error


def test_a_file_of_prompts_may_be_a_pipe(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    assert generate.prompt_file(str(pipe)) == pipe
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError):
            generate.prompt_file(str(path))
