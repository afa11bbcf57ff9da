"""`dreamer data prepare` end to end on planted records: what is dropped, counted, repeated, refused."""

import csv
import gzip
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.data import preparation, preparation_worker, readers
from dreamer_jax.data.preparation import prepare
from dreamer_jax.data.preparation_worker import is_heldout
from dreamer_jax.data.storage import Kept, explained
from dreamer_jax.errors import ConfigError, UserError
from tests.data.preparing import contents, problems, run, start, texts, write_lines, write_mixture
from tests.outside import SAMPLES, sample

RESOURCE = pytest.importorskip("resource")

MIXTURE = """\
    sources:
      first: {{path: {0}/first.jsonl, calculator_notes: remove}}
      second: {{path: {0}/second.jsonl.gz, fields: {{question: problem, answer: messages.1.content}}}}
    clean: {{max_record_bytes: 20000, max_characters: 5000}}
    decontaminate:
      benchmarks:
        test: {{path: {0}/test.jsonl}}
    """


def dropped(report: dict, source: str) -> dict[str, int]:
    return {rule: tally["records"] for rule, tally in report["sources"][source]["dropped"].items()}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two sources with one of everything that must go, and near misses that must stay."""
    good = problems(60)
    tests = problems(30, seed=1)
    near = dict(good[0], question=good[0]["question"].replace("How many", "How much"))
    sign = dict(good[1], answer=good[1]["answer"].replace("+", "-"))
    number = dict(good[2], question=good[2]["question"].replace("there are ", "there are 1"))
    thought = [dict(p) for p in problems(6, seed=2)]
    thought[0]["answer"] = "<think>hm</think>\n" + thought[0]["answer"]
    thought[1]["answer"] = "hm\n</think>\n" + thought[1]["answer"]
    thought[2]["answer"] = (
        "<|begin_of_thought|>hm<|end_of_thought|>\n<|begin_of_solution|>" + thought[2]["answer"] + "<|end_of_solution|>"
    )
    thought[3]["answer"] = "<think>never ends " + thought[3]["answer"]
    thought[4]["answer"] = "<think>only this</think>"
    thought[5]["answer"] = thought[5]["answer"].replace(" = ", " = <<1+1=2>>")
    bad = [
        b"nonsense\n", b'["a list"]\n', b'{"question": "no answer"}\n', b'{"question": "a", "answer": 1}\n',
        b'{"question": "\xff", "answer": "b"}\n', b'{"question": "\\ud800", "answer": "b"}\n', b"\n",
        json.dumps({"question": "long", "answer": "x" * 30000}).encode() + b"\n",
        json.dumps({"question": "too many characters", "answer": "y " * 4000}).encode() + b"\n",
        json.dumps({"question": "empty", "answer": " \u200b\n"}).encode() + b"\n",
        json.dumps({"question": "lost", "answer": "caf\ufffd"}).encode() + b"\n",
    ]  # fmt: skip
    contaminated = [tests[0], dict(tests[1], question="Please: " + tests[1]["question"].upper())]
    write_lines(tmp_path / "first.jsonl", [*good, near, sign, number, *thought, *bad, *contaminated, good[5]])
    second = [*problems(20, seed=3), good[7], good[7], dict(good[8], question=good[8]["question"] + "  ")]
    lines = [{"problem": r["question"], "messages": [{}, {"content": r["answer"]}]} for r in second]
    (tmp_path / "second.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in lines)))
    write_lines(tmp_path / "test.jsonl", tests)
    return write_mixture(tmp_path / "mixture.yaml", MIXTURE.format(tmp_path))


def test_a_record_without_a_text_is_empty_whatever_its_template_says(tmp_path: Path) -> None:
    records = [
        {"q": "What is 1+1?", "hint": "", "a": "2"},  # one field of a prompt may be empty
        {"q": "", "hint": " ", "a": "3"},
        {"q": "What is 2+2?", "hint": "Add.", "a": "\u200b\n"},
        {"q": "What is 3+3?", "hint": "Add.", "a": "<think>six</think>"},
    ]
    write_lines(tmp_path / "a.jsonl", records)
    templates = 'prompt: "Question: {q} ({hint}) ", completion: "So\\n #### {a}"'
    report = run(
        write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: {tmp_path}/a.jsonl, {templates}}}}}"),
        tmp_path / "out",
    )
    assert dropped(report, "a") == {"empty": 3}
    assert texts(tmp_path / "out") == ["Question: What is 1+1? () So\n #### 2"]
    fixed = 'prompt: "Tell me something.", completion: "{a}"'  # a prompt without fields is none that is empty
    report = run(
        write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: {tmp_path}/a.jsonl, {fixed}}}}}"), tmp_path / "fixed"
    )
    assert report["total"]["kept"] == 2


def test_data_of_other_rules_are_not_gone_on_with(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out")
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    plan["identity"]["version"] -= 1
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match="holds a preparation by other rules, those of another version of this program"):
        run(corpus, tmp_path / "out")


def test_everything_planted_is_handled_and_counted(corpus: Path, tmp_path: Path) -> None:
    report = run(corpus, tmp_path / "out")
    assert dropped(report, "first") == {
        "broken: not JSON": 1,
        "broken: not an object": 1,
        "broken: without a field": 1,
        "broken: with a field that isn't text": 1,
        "broken: not valid UTF-8": 1,
        "broken: not valid Unicode": 1,
        "broken: over max_record_bytes": 1,
        "over max_characters": 1,
        "empty": 1,
        "characters lost": 1,
        "trace cut short": 1,
        "nothing after the trace": 1,
        "contaminated: equal, test": 1,
        "contaminated: overlap, test": 1,
        "exact duplicate": 1,
        "near duplicate": 1,
    }
    assert dropped(report, "second") == {"exact duplicate": 3}
    changed = {rule: tally["records"] for rule, tally in report["sources"]["first"]["changed"].items()}
    assert changed == {"traces removed": 3, "calculator notes removed": 1}
    first = report["sources"]["first"]
    assert first["read"] == 60 + 3 + 6 + 10 + 2 + 1 and first["kept"] == 60 + 2 + 4
    assert report["total"]["kept"] == 66 + 20 == len(texts(tmp_path / "out"))
    near = first["dropped"]["near duplicate"]["examples"][0]
    assert "How much" in near["text"] and "How many" in near["because"]

    kept = texts(tmp_path / "out")
    good = problems(60)
    assert kept[:60] == [f"{p['question']}\n{p['answer']}" for p in good]
    assert kept[60].endswith(good[1]["answer"].replace("+", "-")), "a changed sign is another problem"
    assert kept[61].startswith(good[2]["question"].replace("there are ", "there are 1"))
    assert not any("think" in text or "thought" in text or "<<" in text or "solution" in text for text in kept)
    assert sum(len(text.encode()) + 2 for text in kept) == report["total"]["kept_tokens"]
    table = (tmp_path / "out" / "report.txt").read_text()
    assert "  - near duplicate" in table and "-> like, in first: " in table
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


def test_the_number_of_workers_changes_nothing(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    run(corpus, tmp_path / "one")
    run(corpus, tmp_path / "three", workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    # Nor does cutting the files into many more units (the shards are others then).
    monkeypatch.setattr(preparation, "SMALLEST_UNIT", 1000)
    monkeypatch.setattr(preparation.dedup, "KEYS_IN_A_TASK", 300)
    run(corpus, tmp_path / "cut")
    assert texts(tmp_path / "cut") == texts(tmp_path / "one")
    assert len(contents(tmp_path / "cut")) > len(contents(tmp_path / "one")) + 10


def test_rules_can_be_switched_off(corpus: Path, tmp_path: Path) -> None:
    text = corpus.read_text()
    plain = write_mixture(
        tmp_path / "plain.yaml",
        text.partition("decontaminate")[0].replace("clean: {", "clean: {traces: keep, ")
        + "deduplicate: {exact: false, near: false}\n",
    )
    report = run(plain, tmp_path / "out")
    rules = {rule for source in report["sources"] for rule in dropped(report, source)}
    assert not any("duplicate" in rule or "contaminated" in rule or "trace" in rule for rule in rules)
    prompts = write_mixture(tmp_path / "prompts.yaml", text + "deduplicate: {compare: prompt}\n")
    report = run(prompts, tmp_path / "prompts")
    assert dropped(report, "first")["exact duplicate"] == 2, "the changed sign is in the answer"


def test_an_unfinished_preparation_goes_on(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(corpus, tmp_path / "whole")
    out = tmp_path / "out"
    calls, real = [], preparation_worker.write_shard

    def fail_once(stem: Path, *arguments):
        calls.append(stem.name)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(stem, *arguments)

    monkeypatch.setattr(preparation_worker, "write_shard", fail_once)
    with pytest.raises(OSError, match="No space"):
        run(corpus, out)
    assert not (out / "index.json").exists()
    with pytest.raises(UserError, match="its preparation hasn't ended; run it again to go on"):
        texts(out)
    monkeypatch.setattr(preparation_worker.UnitFilter, "write", None)  # would fail: the filtering is done already
    lines: list[str] = []
    prepare(corpus, out, 1, say=lines.append)
    assert calls == ["first-00000", "second-00000", "second-00000"]
    assert "2 of 2 tasks are filtered already" in lines and "1 of 2 tasks are written already" in lines
    assert contents(out) == contents(tmp_path / "whole")
    assert not (out / "work").exists()
    (out / "work").mkdir()  # as if killed between the index and the cleaning up
    (out / "shards" / "first-00000.json").write_text("{}")
    prepare(corpus, out, 1, say=lines.append)
    assert lines[-1] == f"{out} is already prepared"
    assert contents(out) == contents(tmp_path / "whole") and not (out / "work").exists()


@pytest.mark.parametrize("lost", ["report.json", "shards/first-00000.array_record", "heldout/first.jsonl"])
def test_what_is_missing_of_finished_data_is_said(tmp_path: Path, lost: str) -> None:
    """ "Prepare again" is what those who read the data are told: then it mustn't say that all is done."""
    write_lines(tmp_path / "first.jsonl", problems(60))
    write_lines(tmp_path / "second.jsonl", problems(5, seed=1))
    mixture = write_mixture(tmp_path / "mixture.yaml", HOLDING_OUT.format(tmp_path))
    run(mixture, tmp_path / "out")
    (tmp_path / "out" / lost).unlink()
    with pytest.raises(UserError, match=rf"{lost}.* is missing.*remove the folder and prepare again"):
        run(mixture, tmp_path / "out")


def test_nothing_that_is_kept_is_no_data(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", problems(9))
    text = f"sources: {{a: {{path: {tmp_path}/a.jsonl}}}}\nclean: {{max_characters: 3}}"
    mixture = write_mixture(tmp_path / "m.yaml", text)
    with pytest.raises(UserError, match=r"no record of any source is kept \(most, 9, as over max_characters\)"):
        run(mixture, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_faults_that_show_later_are_named_where_they_are_written(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", problems(3))
    for line, said in (
        ("prompt: 'a {'", r"sources\.a\.prompt"),
        ("completion: x", r"sources\.a\.completion: 'x' names no field"),
        ("format: task", r"sources\.a\.path: no task"),
    ):
        text = f"sources:\n  a:\n    path: {tmp_path}/a.jsonl\n    {line}\n"
        mixture = write_mixture(tmp_path / "m.yaml", text)
        row = 3 if "no task" in said else 4
        with pytest.raises(ConfigError, match=rf"m\.yaml:{row}: {said}"):
            run(mixture, tmp_path / "out")


def test_a_disk_that_is_full_while_numpy_writes_is_said() -> None:
    with (
        pytest.raises(UserError, match=r"no space left to write \(128 requested and 7 written\)"),
        explained(Path("x")),
    ):
        raise OSError("128 requested and 7 written")


def test_other_settings_or_inputs_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(corpus, out)
    text = corpus.read_text()
    corpus.write_text(text.replace("5000", "6000"))
    with pytest.raises(UserError, match="holds a preparation of other settings"):
        run(corpus, out)
    corpus.write_text(text.replace("calculator_notes: remove", "calculator_notes: remove, epochs: 3, licence: MIT"))
    run(corpus, out)  # shares decide nothing of what is prepared; the index takes them over
    index = json.loads((out / "index.json").read_text())
    assert index["sources"]["first"]["epochs"] == 3 and index["sources"]["first"]["licence"] == "MIT"
    with (tmp_path / "first.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="input files that have changed"):
        run(corpus, out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no prepared data"):
        run(corpus, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_a_missing_tokenizer_is_named_by_its_file(corpus: Path, tmp_path: Path) -> None:
    lines = [line for line in corpus.read_text().splitlines() if not line.startswith("tokenizer:")]
    for name in ("none.model", "none.json"):
        corpus.write_text("\n".join([f"tokenizer: {tmp_path / name}", *lines]))
        with pytest.raises(UserError, match=rf"^{corpus}: tokenizer: .*{name}"):
            run(corpus, tmp_path / "out")


def test_two_at_once_are_refused(corpus: Path, tmp_path: Path) -> None:
    with preparation._locked(tmp_path / "out"), pytest.raises(UserError, match="another process is preparing"):
        run(corpus, tmp_path / "out")


def test_kill_and_go_on(corpus: Path, tmp_path: Path) -> None:
    """Killed with its workers at work, it gives the same bytes in the end (ten kills: test_preparation_slow)."""
    write_lines(tmp_path / "first.jsonl", problems(30_000, seed=9))
    process = start(corpus, tmp_path / "out", 2)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("work/unit-*/done.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "index.json").exists()
    run(corpus, tmp_path / "out")
    run(corpus, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("first.jsonl", b"", r"sources\.first: holds no records"),
        (
            "first.jsonl",
            b"[1]\n[2]\n",
            r"sources\.first: all of its 2 records are broken\. The first: .*line 1 is a list",
        ),
        ("second.jsonl.gz", gzip.compress(os.urandom(50000))[:-2000], "second.jsonl.gz: the gzip file is cut short"),
        ("second.jsonl.gz", b"plain text", "second.jsonl.gz: not a sound gzip file"),
        ("test.jsonl", b'{"question": "fine"}\nbroken\n', r"benchmarks\.test: .*line 2: is not JSON.*mend it"),
        ("test.jsonl", b"", r"benchmarks\.test: .* holds no records"),
    ],
)
def test_input_that_is_refused(corpus: Path, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    for workers in (1, 2) if "cut short" in message else (1,):
        with pytest.raises(UserError, match=message):
            run(corpus, tmp_path / "out", workers)
        assert not (tmp_path / "out" / "index.json").exists()
        assert not list((tmp_path / "out").glob("work/*.tmp-*"))


def test_names_that_are_no_unicode_are_reported(tmp_path: Path) -> None:
    broken = b'{"\\ud800": "x"}\n'
    content = b"".join(json.dumps(p).encode() + b"\n" for p in problems(2)) + broken
    try:
        (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_bytes(content)
    except OSError:  # where file names are Unicode
        (tmp_path / "a.jsonl").write_bytes(content)
    mixture = write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: '{tmp_path}/*.jsonl'}}}}")
    report = run(mixture, tmp_path / "out")
    assert dropped(report, "a") == {"broken: without a field": 1} and report["total"]["kept"] == 2
    assert r"(its fields: \ud800)" in (tmp_path / "out" / "report.txt").read_text(encoding="utf-8")
    assert run(mixture, tmp_path / "out") == json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))


def test_a_benchmark_without_questions_is_refused(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text().replace("/test.jsonl}", "/test.jsonl, text: question}"))
    with pytest.raises(ConfigError, match=r"benchmarks\.test\.text: 'question' names no field"):
        run(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_files(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"decontaminate\.benchmarks\.test\.path: no file"):
        run(corpus, tmp_path / "out")


def test_a_huge_record_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "first.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(problems(1)[0]).encode() + b"\n" + b'{"question": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + json.dumps(problems(2)[1]).encode() + b"\n")
    mixture = write_mixture(
        tmp_path / "m.yaml", f"sources: {{a: {{path: {path}}}}}\nclean: {{max_record_bytes: 100000}}\n"
    )
    tracemalloc.start()
    report = run(mixture, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dropped(report, "a") == {"broken: over max_record_bytes": 1} and report["total"]["kept"] == 2
    assert peak < 60e6, "the table of the benchmarks, and nothing near the record"


def test_a_full_disk_is_said_and_leaves_nothing_half_written(corpus: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: writing fails in the same places."""
    write_lines(tmp_path / "first.jsonl", problems(3000, seed=9))
    soft, hard = RESOURCE.getrlimit(RESOURCE.RLIMIT_FSIZE)
    out = tmp_path / "out"
    try:
        for limit in (100_000, 600_000, 2_000_000):
            RESOURCE.setrlimit(RESOURCE.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(UserError, match=r"(no space left|can't write).*(File too large|start again)"):
                run(corpus, out)
            assert not (out / "index.json").exists() and not list(out.rglob("*.tmp-*"))
    finally:
        RESOURCE.setrlimit(RESOURCE.RLIMIT_FSIZE, (soft, hard))
    run(corpus, out)
    run(corpus, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def test_units_together_hold_every_line_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"n": i, "x": "x" * rng.randrange(200)}) for i in range(300)]
    path.write_text("\n".join(lines))  # without a last line break
    spec = readers.SourceSpec(path=str(path))
    for size in (1, 7, 100, 1000, 10**6):
        units = readers.plan_units("a", spec, size)
        found = [item.value for unit in units for item in readers.read_unit(spec, unit, 1000)]
        assert [value["n"] for value in found if isinstance(value, dict)] == list(range(300))


def test_samples_of_public_sets(tmp_path: Path) -> None:
    """Every layout of file at once; the counts are those of a reading of the samples."""
    with (SAMPLES / "mmlu_math/elementary_mathematics_test.csv").open(newline="") as file:
        asked = [row[0] for row in csv.reader(file)]
    its = [*sample("math/train"), *({"problem": question, "solution": "?"} for question in asked)]
    with gzip.open(tmp_path / "math.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in its)
    mixture = write_mixture(
        tmp_path / "real.yaml",
        f"""\
        sources:
          gsm8k: {{path: {SAMPLES}/gsm8k/train.jsonl, calculator_notes: remove}}
          math: {{path: {tmp_path}/math.jsonl.gz, fields: {{question: problem, answer: solution}}}}
        decontaminate:
          benchmarks:
            gsm8k: {{path: {SAMPLES}/gsm8k/test.jsonl}}
            math: {{path: {SAMPLES}/math/test.jsonl, text: "{{problem}}"}}
            mmlu: {{path: "{SAMPLES}/mmlu_math/*_test.csv", columns: "question, A, B, C, D, answer"}}
            mathqa: {{path: {SAMPLES}/mathqa/test.jsonl, text: "{{problem}}"}}
        """,
    )
    report = run(mixture, tmp_path / "out", workers=2)
    assert report["sources"]["gsm8k"]["read"] == 122
    changed = report["sources"]["gsm8k"]["changed"]["calculator notes removed"]["records"]
    assert changed == 120  # all but the lines 30 and 110
    assert dropped(report, "gsm8k") == {"contaminated: overlap, gsm8k": 2}
    assert dropped(report, "math") == {
        "contaminated: equal, math": 1,
        "contaminated: overlap, math": 1,
        "contaminated: contained, math": 1,
        "contaminated: equal, mmlu": 9,
    }
    assert report["sources"]["math"]["kept"] == 19
    assert not any("<<" in text for text in texts(tmp_path / "out"))
    lengths = np.load(next((tmp_path / "out" / "shards").glob("math-*.npy")))
    assert lengths[:, 0].sum() == report["sources"]["math"]["kept_tokens"]


HOLDING_OUT = """\
    sources:
      first: {{path: {0}/first.jsonl, heldout: 4}}
      second: {{path: {0}/second.jsonl}}
    """


def test_what_is_held_out_has_no_copy_among_the_data(tmp_path: Path) -> None:
    """One in four by a hash of the prompt: copies and near copies of it, of its own source or another, aren't kept."""
    first = problems(80)
    near = [dict(p, question=p["question"].replace("How many", "How much")) for p in first[:40]]
    other_answers = [dict(p, answer="So " + p["answer"]) for p in first[40:60]]
    write_lines(tmp_path / "first.jsonl", [*first, *other_answers, *first[:5]])
    write_lines(tmp_path / "second.jsonl", near)
    mixture = write_mixture(tmp_path / "mixture.yaml", HOLDING_OUT.format(tmp_path))
    report = run(mixture, tmp_path / "out")
    lines = (tmp_path / "out" / "heldout" / "first.jsonl").read_text(encoding="utf-8").splitlines()
    heldout = [json.loads(line) for line in lines]
    assert 10 < len(heldout) < 40 and dropped(report, "first")["held out"] == len(heldout)
    chosen = {record["prompt"] for record in heldout}
    assert chosen == {p["question"] + "\n" for p in first if is_heldout(Kept(p["question"], "", np.zeros(0), 0), 4)}
    kept = texts(tmp_path / "out")
    assert len(kept) == report["total"]["kept"] and "held out" not in dropped(report, "second")
    for record in heldout:
        assert not any(record["prompt"] in text or record["prompt"].replace("many", "much") in text for text in kept)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert "heldout" not in index["sources"]["first"]["shards"][0]


def test_held_out_records_are_the_same_whoever_prepares_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one unit or several, by one process or two."""
    monkeypatch.setattr(preparation, "SMALLEST_UNIT", 4000)
    write_lines(tmp_path / "first.jsonl", problems(60))
    write_lines(tmp_path / "second.jsonl", problems(5, seed=1))
    mixture = write_mixture(tmp_path / "mixture.yaml", HOLDING_OUT.format(tmp_path))
    run(mixture, tmp_path / "one")
    monkeypatch.undo()
    run(mixture, tmp_path / "two", workers=2)
    one, two = ((tmp_path / out / "heldout" / "first.jsonl").read_text() for out in ("one", "two"))
    assert one == two and one.count("\n") > 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("heldout: 4", "heldout: 1"), "sources.first.heldout: 1 has no meaning"),
        (
            ("sources:", "deduplicate: {{near: false}}\n    sources:"),
            "sources.first.heldout: copies could be on both sides",
        ),
    ],
)
def test_holding_out_what_cannot_be_held_out_is_refused(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    write_lines(tmp_path / "first.jsonl", problems(3))
    write_lines(tmp_path / "second.jsonl", problems(3))
    mixture = write_mixture(tmp_path / "mixture.yaml", HOLDING_OUT.replace(*change).format(tmp_path))
    with pytest.raises(ConfigError, match=line):
        run(mixture, tmp_path / "out")
