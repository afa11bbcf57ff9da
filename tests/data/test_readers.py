"""Formats: gzip, Parquet, CSV, text, TFDS, the hub (with a stand-in), tasks; and the paper's catalogue."""

import gzip
import json
import sys
import types
from pathlib import Path

import pytest

from dreamer_jax.data import formats, readers
from dreamer_jax.data.catalogue import BENCHMARKS, TRAINING
from dreamer_jax.data.jsonl import Broken
from dreamer_jax.data.mixture import BenchmarkSpec, SourceSpec, load_mixture
from dreamer_jax.data.tasks import TASKS, is_heldout
from dreamer_jax.errors import ConfigError, UserError
from tests.data.preparing import problems, run, texts, write_lines, write_mixture

RECORDS = problems(50)


def read(spec: SourceSpec, limit: int = 10_000, unit_bytes: int = 1 << 30) -> list:
    """Values of all records; the kind of what is broken."""
    items = [
        item for unit in readers.plan_units("s", spec, unit_bytes) for item in readers.read_unit(spec, unit, limit)
    ]
    return [f"broken: {item.value.kind}" if isinstance(item.value, Broken) else item.value for item in items]


def test_folders_patterns_and_gzip(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "b.jsonl", RECORDS[:10])
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(write_lines(tmp_path / "x", RECORDS[10:]).read_bytes()))
    (tmp_path / "in" / ".hidden").write_text("no")
    expected = RECORDS[10:] + RECORDS[:10]
    assert read(SourceSpec(path=str(tmp_path / "in"))) == expected
    assert read(SourceSpec(path=str(tmp_path / "in" / "*.jsonl*"))) == expected
    assert read(SourceSpec(path=str(tmp_path / "in"), records=3)) == RECORDS[10:13]
    assert read(SourceSpec(path=str(tmp_path / "in"), records=42)) == expected[:42]
    limited = SourceSpec(path=str(tmp_path / "in" / "*.jsonl*"), records=42)
    (unit,) = readers.plan_units("s", limited, 1 << 30)
    assert [item.where for item in readers.read_unit(limited, unit, 10_000)][-1] == "b.jsonl line 2"
    (unit,) = readers.plan_units("s", SourceSpec(path=str(tmp_path / "in" / "b.jsonl"), records=3), 1)
    assert unit.file == str(tmp_path / "in" / "b.jsonl"), "of one file as always"
    with pytest.raises(ConfigError, match=r"sources\.s\.path: no file"):
        read(SourceSpec(path=str(tmp_path / "none*")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"sources\.s\.path: no file in the folder '.*empty'"):
        read(SourceSpec(path=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match=r"sources\.s\.format: .*doesn't end in \.jsonl"):
        read(SourceSpec(path=str(tmp_path / "x")))


def test_byte_order_mark_and_over_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(RECORDS[0]).encode() + b"\r\n{" + b"x" * 500 + b"\n{}\n\n{}")
    assert read(SourceSpec(path=str(path)), limit=300) == [RECORDS[0], "broken: over max_record_bytes", {}, {}]


def test_text(tmp_path: Path) -> None:
    lines = [f"line {i} " + "x" * (i % 90) + "\n" for i in range(3000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    spec = SourceSpec(path=str(tmp_path / "a.txt"), prompt="", completion="{text}")
    values = read(spec)
    assert "".join(value["text"] for value in values) == "".join(lines) and len(values) > 3
    assert all(len(value["text"]) <= formats.TEXT_RECORD_BYTES for value in values)
    assert "".join(value["text"] for value in read(spec, unit_bytes=10_000)) == "".join(lines)
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\xfe\n")
    assert read(spec) == ["broken: not valid UTF-8"]
    (tmp_path / "a.txt").write_text("before\n" + "x" * 300 + "\nafter\n")
    assert read(spec, limit=200) == [{"text": "before\n"}, "broken: over max_record_bytes", {"text": "after\n"}]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\nquestion,answer\n"two\nlines, ""quoted""",4\n\nthree,columns,here\n\xff,x\n\r\n')
    rows = read(SourceSpec(path=str(path)))
    assert rows[0] == {"question": 'two\nlines, "quoted"', "answer": "4"}
    assert rows[1] == "broken: with other columns" and len(rows) == 3
    with pytest.raises(UserError, match=r"a\.csv: its header is not CSV \(field larger than field limit \(5\)\)"):
        read(SourceSpec(path=str(path)), limit=5)
    twins = tmp_path / "twins.csv"
    twins.write_text("question,,answer,,answer\nq,,a,,b\n")
    with pytest.raises(UserError, match=r"twins\.csv: has several columns of the name 'answer'"):
        read(SourceSpec(path=str(twins)))
    assert read(SourceSpec(path=str(twins), columns="question,,answer,,other"))[0]["answer"] == "answer"
    named = read(SourceSpec(path=str(path), columns="q, a"))
    assert named[0] == {"q": "question", "a": "answer"}
    report = run(write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: {path}}}}}"), tmp_path / "out")
    assert report["sources"]["a"]["dropped"]["broken: not valid Unicode"]["records"] == 1


def test_a_csv_quote_that_is_not_closed_loses_no_records(tmp_path: Path) -> None:
    """It would make one field of all that follows; quotes in a field without quotes around it are letters."""
    path = tmp_path / "a.csv"
    spec = SourceSpec(path=str(path))
    good = 'question,answer\nx,"two\nlines"\ny,5" and 3"\n'
    for rest in ('z,7"\n', 'z,"a ""word"""\n', 'z,"almost" closed\n'):
        path.write_text(good + rest)
        assert len(read(spec)) == 3
    for rest in ('z,"7\nv,8\nw,9\n', 'z,"7', 'z,"7\n' + "v,8\n" * 100):
        path.write_text(good + rest)
        for limit in (10_000, 50):
            with pytest.raises(UserError, match=r"a\.csv: line 5 begins a record with a quote that isn't closed"):
                read(spec, limit)


def test_a_csv_field_over_the_limit_is_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    long = "\n".join(f'part {i}, ""tail"" {i}' for i in range(100))  # each line of it has as many columns as a record
    path.write_text(f'question,answer\nfirst,1\nlong,"{long}"\nlast,2\n{"x" * 300},3\n"in\ntwo lines",4\n')
    first, last = {"question": "first", "answer": "1"}, {"question": "last", "answer": "2"}
    over = "broken: over max_record_bytes"
    end = {"question": "in\ntwo lines", "answer": "4"}
    assert read(SourceSpec(path=str(path)), limit=200) == [first, over, last, over, end]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = arrow.table(
        {
            "question": [r["question"] for r in RECORDS],
            "messages": [[{"content": "q"}, {"content": r["answer"]}] for r in RECORDS],
            "level": list(range(50)),
        }
    )
    parquet.write_table(table, path, row_group_size=7)
    spec = SourceSpec(path=str(path), fields={"answer": "messages.1.content"})
    assert len(readers.plan_units("s", spec, 1)) == 8
    for size in (1, 1 << 30):
        rows = read(spec, unit_bytes=size)
        assert [row["level"] for row in rows] == list(range(50))
        assert rows[3]["messages"][1]["content"] == RECORDS[3]["answer"]
    assert "broken: over max_record_bytes" in read(spec, limit=20)
    for size in (1, 1 << 30):
        limited = read(SourceSpec(path=str(path), records=17), unit_bytes=size)
        assert [row["level"] for row in limited] == list(range(17))
    twin = arrow.Table.from_arrays([arrow.array(["x"]), arrow.array(["y"])], names=["question", "question"])
    parquet.write_table(twin, tmp_path / "twin.parquet")
    with pytest.raises(UserError, match=r"twin\.parquet: has several columns of the name 'question'"):
        read(SourceSpec(path=str(tmp_path / "twin.parquet")))
    text = f"sources: {{a: {{path: {path}, fields: {{answer: messages.1.content}}}}}}"
    run(write_mixture(tmp_path / "m.yaml", text), tmp_path / "out")
    assert texts(tmp_path / "out") == [f"{r['question']}\n{r['answer']}" for r in RECORDS]
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:40] + bytes(200) + content[240:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.parquet: (not a whole Parquet file|can't be read to its end)"):
            read(spec)
    late = arrow.array([0, 1 << 50], arrow.timestamp("ms"))  # in the year 37648
    parquet.write_table(arrow.table({"question": ["a", "b"], "when": late}), path)
    assert [(row["question"], row["when"] is None) for row in read(spec)] == [("a", False), ("b", True)]
    bad = arrow.array([b"fine", b"\xff"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"question": bad}), path)
    assert read(spec) == [{"question": "fine"}, "broken: not valid UTF-8"]


def test_tasks(tmp_path: Path) -> None:
    spec = SourceSpec(path="boolean", format="task", records=200, difficulty=2)
    rows = read(spec)
    assert len(rows) == 200 and rows == read(spec)
    assert not any(is_heldout(row["question"]) for row in rows)
    with pytest.raises(ConfigError, match="no task 'chess'; one of boolean"):
        read(SourceSpec(path="chess", format="task", records=3))
    with pytest.raises(ConfigError, match="say how many"):
        read(SourceSpec(path="boolean", format="task"))
    for path, difficulty, hardest in (
        ("boolean", 40, 16),
        ("boolean", 0, 16),
        ("reachability", 20, TASKS["reachability"].hardest),
    ):
        message = rf"sources\.s\.difficulty: {difficulty} is none of the difficulties of {path}, 1 to {hardest}"
        with pytest.raises(ConfigError, match=message):
            read(SourceSpec(path=path, format="task", records=9, difficulty=difficulty))


class Rows(list):
    """What datasets.load_dataset gives in streaming, of two shards."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> list:
        return self[index::num_shards]


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path, config, split, streaming):
        asked.append((path, config, split, streaming))
        if path == "gone/away":
            raise FileNotFoundError("no such data set")
        return Rows([{"question": f"{config} {i}", "answer": "x" * (50 * i)} for i in range(4)])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    spec = SourceSpec(path="some/set", format="hub", config="one, two", split="cot")
    assert len(readers.plan_units("s", spec, 1)) == 4
    rows = read(spec, limit=120)
    assert set(asked) == {("some/set", "one", "cot", True), ("some/set", "two", "cot", True)}
    assert [row if isinstance(row, str) else row["question"] for row in rows] == [
        "one 0", "one 2", "one 1", "broken: over max_record_bytes",
        "two 0", "two 2", "two 1", "broken: over max_record_bytes",
    ]  # fmt: skip
    first = SourceSpec(path="some/set", format="hub", config="one, two", split="cot", records=5)
    assert [row["question"] for row in read(first)] == ["one 0", "one 2", "one 1", "one 3", "two 0"]
    benchmark = BenchmarkSpec(path="some/set", format="hub", config="one")
    assert len(list(readers.read_all(benchmark, "b", 1000))) == 4
    with pytest.raises(UserError, match="can't open split train of gone/away on the hub: no such data set"):
        read(SourceSpec(path="gone/away", format="hub"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"format hub needs datasets; .*\[data\]"):
        read(SourceSpec(path="some/set", format="hub"))


def test_tfds_builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow_datasets")
    from dreamer_jax.data import builders

    assert set(builders.BUILDERS) == set(TRAINING) | set(BENCHMARKS)
    lines = [{"problem": r["question"], "solution": r["answer"]} for r in RECORDS]
    write_lines(tmp_path / "test.jsonl", [*lines, b"broken\n"])
    folder = builders.build("math_test", tmp_path / "tfds", str(tmp_path / "test.jsonl"))
    spec = SourceSpec(path=str(folder), format="tfds", split="test")
    rows = read(spec)
    assert sorted(row["question"] for row in rows) == sorted(r["question"] for r in RECORDS)
    assert {row["question"]: row["answer"] for row in rows}[RECORDS[4]["question"]] == RECORDS[4]["answer"]
    by_name = SourceSpec(path=str(tmp_path / "tfds"), format="tfds", config="dreamer_math_test", split="test")
    assert read(by_name) == rows
    assert len(list(readers.read_all(BenchmarkSpec(path=str(folder), format="tfds"), "b", 10_000))) == 50
    with pytest.raises(UserError, match="can't open split train"):
        read(SourceSpec(path=str(folder), format="tfds"))
    shard = next(folder.glob("*array_record*"))
    content = shard.read_bytes()
    for cut in (len(content) - 5, 100):
        shard.write_bytes(content[:cut])
        with pytest.raises(UserError, match=r"row 1 can't be read .*build the data again"):
            read(spec)
    with pytest.raises(UserError, match="no data set 'maths' in the catalogue; one of math, "):
        builders.build("maths", tmp_path)

    def load_dataset(path, config, split, streaming):
        assert (path, config, split) == ("nvidia/OpenMathReasoning", None, "cot")
        return Rows([{"problem": r["question"], "generated_solution": r["answer"]} for r in RECORDS])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    folder = builders.build("openmath_reasoning", tmp_path / "hub")
    assert len(read(SourceSpec(path=str(folder), format="tfds"))) == 50
    assert "tensorflow" not in sys.modules


def test_paper_mixture_names_the_catalogue() -> None:
    mixture = load_mixture("paper")
    assert len({entry.hub for entry in TRAINING.values()}) == 15
    assert list(mixture.sources) == list(TRAINING)
    for name, entry in TRAINING.items():
        spec = mixture.sources[name]
        assert (spec.path, spec.config, spec.split) == (entry.hub, entry.config, entry.splits["train"])
        assert (spec.licence, spec.url, spec.format) == (entry.licence, entry.url, "hub")
        assert spec.fields.get("question", "") == entry.question
        assert spec.fields.get("answer", "text") == entry.answer
        assert (spec.calculator_notes == "remove") == entry.calculator_notes
    assert list(mixture.decontaminate.benchmarks) == list(BENCHMARKS)
    for name, entry in BENCHMARKS.items():
        spec = mixture.decontaminate.benchmarks[name]
        assert (spec.path, spec.config, spec.split) == (entry.hub, entry.config, "test")
        assert spec.fields["question"] == entry.question
    load_mixture("gsm8k_math")
