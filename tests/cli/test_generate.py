"""What `dreamer generate` and `dreamer chat` print, with a model that repeats its prompt."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from dreamer_jax.cli import chat, generate
from dreamer_jax.cli.main import main
from dreamer_jax.inference import Text


class Echo:
    """Answers a prompt with `<prompt>`."""

    exits_early, drafts = True, False

    def generate(self, prompts, max_tokens, sampling, stop, first_number):
        return [Text(f"<{prompt}>{first_number + i}", [7, 8, 9], "stop", 2.5) for i, prompt in enumerate(prompts)]

    def stream(self, prompts, max_tokens, sampling, stop):
        answer = f"<{prompts[0]}>"
        for end in range(1, len(answer) + 1):
            yield [Text(answer[:end], [7] * end, "length", 2.0)]


@pytest.fixture(autouse=True)
def run(monkeypatch):
    config = SimpleNamespace(data=SimpleNamespace(prompt="Q: {question}\nA: "))
    for command in (generate, chat):
        monkeypatch.setattr(command, "open_model", lambda options, sampler: (Echo(), config))


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
    assert lines[0] == {"prompt": "p", "id": 1, "generated": "<p>0", "finish": "stop", "tokens": 3, "mean_depth": 2.5}


def test_chat_fills_the_prompt_of_the_run_and_keeps_the_history_when_asked(monkeypatch, capsys):
    for extra, second in (([], "<Q: b\nA: >"), (["--history"], "<Q: a\nA: <Q: a\nA: >\nQ: b\nA: >")):
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))  # nothing to answer in an empty line
        assert main(["chat", "runs/x", *extra]) == 0
        assert capsys.readouterr().out == f"<Q: a\nA: >\n\n{second}\n\n"


def test_ctrl_c_stops_an_answer_on_a_terminal_and_the_chat_goes_on(monkeypatch, capsys):
    def stream(self, prompts, max_tokens, sampling, stop):
        yield [Text("half an", [7, 8], "length", 2.0)]
        if "long" in prompts[0]:
            raise KeyboardInterrupt
        yield [Text("half an answer", 3, "length", 2.0)]

    monkeypatch.setattr(Echo, "stream", stream)
    terminal = io.StringIO("long\nb\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["chat", "runs/x"]) == 0
    assert capsys.readouterr().out == "> half an\n> half an answer\n> "
    monkeypatch.setattr("sys.stdin", io.StringIO("long\nb\n"))
    assert main(["chat", "runs/x"]) == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "runs/x"], "nothing to continue"),
        (["generate", "runs/x", "--file", "missing.jsonl"], "no such file"),
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
    ("line", "message"), [("{", "not JSON"), ('{"id": 1}', "question"), ('{"prompt": 3}', "not a text")]
)
def test_broken_records_are_named_by_line(tmp_path, line, message, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    assert main(["generate", "runs/x", "--file", str(path)]) == 2
    error = capsys.readouterr().err
    assert "line 2" in error and message in error
