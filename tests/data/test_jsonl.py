"""Templates, and one clear message for each kind of broken record."""

import gzip
from pathlib import Path
from typing import Literal

import pytest

from dreamer_jax.data.jsonl import Broken, JsonlReader, Template
from dreamer_jax.data.records import Record
from dreamer_jax.errors import ConfigError, UserError

GOOD = b'{"question": "1+1?", "answer": "2"}'
BROKEN = {
    "not JSON": (b'{"question": "1+1?" "answer": "2"}', r"is not JSON: Expecting ',' delimiter \(column 21\)"),
    "not an object": (b'["1+1?", "2"]', "is a list, not an object"),
    "without a field": (b'{"question": "1+1?"}', r"has no field 'answer', which data\.completion names .*question"),
    "with a field that isn't text": (b'{"question": "1+1?", "answer": 2}', "field 'answer' is a number, not a string"),
    "not valid UTF-8": (b'{"question": "\xff", "answer": "2"}', r"is not valid UTF-8 \(byte 15 of the line\)"),
    "not valid Unicode": (b'{"question": "\\ud800", "answer": "2"}', "field 'question' holds half of a surrogate"),
}


def reader(folder: Path, content: bytes, on_error: Literal["stop", "skip"] = "stop") -> JsonlReader:
    path = folder / "train.jsonl"
    path.write_bytes(content)
    prompt, completion = Template("{question}\n", "data.prompt"), Template("{answer}", "data.completion")
    return JsonlReader(path, "data.path", prompt, completion, on_error)


def test_gzip(tmp_path: Path) -> None:
    template = Template("{question}", "data.prompt"), Template("{answer}", "data.completion")
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + b"\n" + GOOD))
    assert list(JsonlReader(path, "data.path", *template, "stop")) == [Record("1+1?", "2")] * 2
    for damaged in (path.read_bytes()[:-9], GOOD):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"data\.path: .*train\.jsonl\.gz is not a whole gzip file"):
            list(JsonlReader(path, "data.path", *template, "skip"))


def test_nested_fields() -> None:
    record = {"messages": [{"content": "a"}, {"content": "b"}], "x.y": "c", "hints": ["d", "e"], "one": "f"}
    assert Template("{messages.1.content}{x.y}{hints.*}{one.*}", "k").fill(record) == "bcd\nef"
    assert Template("{q}", "k", {"q": "messages.0.content"}).fill(record) == "a"
    for missing in ("messages.2.content", "messages.x", "messages.².content", "one.y", "z.*"):
        with pytest.raises(Broken, match="has no field"):
            Template(f"{{{missing}}}", "k").fill(record)


def test_reads_records_past_blank_lines_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + GOOD + b"\r\n\n  \n" + '{"answer": "ä\u2028", "question": "{answer}", "x": 1}'.encode()
    assert list(reader(tmp_path, content)) == [Record("1+1?\n", "2"), Record("{answer}\n", "ä\u2028")]


def test_a_line_that_is_cut_short_is_told_with_its_own_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 2\): is not JSON: Expecting ':' delimiter \(column 30\)"):
        list(reader(tmp_path, GOOD + b"\n" + b'{"question": "1+1?", "answer"' + b"\n" + GOOD))


@pytest.mark.parametrize("kind", BROKEN)
def test_stops_at_a_broken_record(tmp_path: Path, kind: str) -> None:
    line, message = BROKEN[kind]
    content = b"\n".join([GOOD] * 16 + [b"", line, GOOD])
    with pytest.raises(UserError, match=rf"train\.jsonl: record 17 \(line 18\): {message}.*--data\.on_error skip"):
        list(reader(tmp_path, content))


def test_skips_and_counts(tmp_path: Path) -> None:
    lines = [line for line, _ in BROKEN.values()]
    read = reader(tmp_path, b"\n".join([*lines, GOOD, lines[0], GOOD]), "skip")
    for _ in range(2):  # reading again counts anew
        assert list(read) == [Record("1+1?\n", "2")] * 2
        assert read.skipped == {kind: 1 + (kind == "not JSON") for kind in BROKEN}


def test_all_broken_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"all of its records are broken \(2\).*record 1 \(line 1\): is not JSON"):
        list(reader(tmp_path, b"x\ny\n", "skip"))


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"answer": ' + b"9" * 5000 + b"}", b"\x00"])
def test_hostile_json_is_only_a_broken_record(tmp_path: Path, line: bytes) -> None:
    read = reader(tmp_path, line + b"\n" + GOOD, "skip")
    assert len(list(read)) == 1
    assert read.skipped == {"not JSON": 1}


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"train\.jsonl: is empty; data\.path needs one JSON object a line"):
        list(reader(tmp_path, content))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    template = Template("{a}", "data.prompt")
    with pytest.raises(UserError, match=r"data\.path: .*none\.jsonl does not exist"):
        list(JsonlReader(tmp_path / "none.jsonl", "data.path", template, template, "skip"))
    with pytest.raises(UserError, match=r"data\.path: can't read"):
        list(JsonlReader(tmp_path, "data.path", template, template, "skip"))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {question}\nA:", "Q: why {b}?\nA:"),
        ("{{{question}}} {{x}}", "{why {b}?} {x}"),
        ("{a.b[0]!r:>5}", "odd name"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_template(template: str, text: str) -> None:
    record = {"question": "why {b}?", "a.b[0]!r:>5": "odd name"}
    assert Template(template, "data.prompt").fill(record) == text


@pytest.mark.parametrize("template", ["{question", "\\boxed{", "a } b", "{}", "{a{b}}"])
def test_lone_brace(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.prompt: a lone [{}].*fields are written \{name\}") as caught:
        Template(template, "data.prompt")
    assert caught.value.key == "data.prompt"
