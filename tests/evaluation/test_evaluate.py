"""Whole evaluations with models whose answers are known: scores, records, resuming, tables, the command."""

from __future__ import annotations

import codecs
import json
import math
import shutil
import threading
import time

import pytest

from dreamer_jax.cli.embed import read_texts
from dreamer_jax.cli.main import main
from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation import Settings, evaluate, tasks
from dreamer_jax.evaluation.records import Records
from dreamer_jax.evaluation.report import table
from dreamer_jax.evaluation.runner import choose_tasks, label_of, spread
from dreamer_jax.inference import Sampling
from dreamer_jax.runs.models import load_run
from tests.evaluation.cases import GSM8K, MATH, MATHQA, Scripted, Successor, model_of, write_benchmarks, write_jsonl
from tests.export.cases import make_run

SOURCE = {"step": 3, "tokens": 300, "depth": 2, "dtype": "float32"}
HALF, REST = math.log(1 / 2), math.log(1 / 516)


@pytest.fixture
def data(tmp_path):
    return write_benchmarks(tmp_path / "data")


def run(model, names, data, tmp_path, limit=None, fresh=False, said=None, **settings):
    """Evaluate into tmp_path / "out"."""
    say = said.append if said is not None else lambda line: None
    options = {"limit": limit, "fresh": fresh, "say": say}
    chosen = choose_tasks(names)
    return evaluate(model, chosen, Settings(str(data), **settings), tmp_path / "out", SOURCE, 8, **options)


def records(tmp_path, label, folder="out"):
    """(header, records by index) of a task."""
    header, *lines = [json.loads(line) for line in (tmp_path / folder / f"{label}.jsonl").read_text().splitlines()]
    return header, {line["index"]: line for line in lines}


def answer_by_question(replies):
    """A model that answers the question a prompt ends with by the reply of that number."""
    numbers = {question: i for i, (question, _) in enumerate(GSM8K)}

    def reply(prompt):
        return replies[numbers[prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")]]

    return Scripted(reply)


REPLIES = [" 3+4=7\n#### 7", " #### $12,500", " it is -3", " about 3.5.", " 18 legs\n#### 18\nQuestion: 5?", ""]


def test_gsm8k(data, tmp_path):
    engine = answer_by_question(REPLIES)
    result = run(model_of(engine), "gsm8k", data, tmp_path)["gsm8k"]
    assert result["questions"] == 6 and result["shots"] == 0
    strict, flexible = result["metrics"]["strict"], result["metrics"]["flexible"]
    assert strict["value"] == pytest.approx(2 / 6)
    assert flexible["value"] == pytest.approx(5 / 6)
    assert strict["standard_error"] == pytest.approx(math.sqrt((2 / 6) * (4 / 6) / 5))
    assert f"Question: {GSM8K[0][0]}\nAnswer:" in engine.prompts
    _, kept = records(tmp_path, "gsm8k")
    assert [kept[i]["strict"] for i in range(6)] == [1, 0, 0, 0, 1, 0]
    assert kept[4]["answer"] == " 18 legs\n#### 18\n"  # without the stop string


def test_few_shot_prompts_hold_solved_examples(data, tmp_path):
    engine = answer_by_question(REPLIES)
    run(model_of(engine), "gsm8k", data, tmp_path, shots=2)
    for prompt in engine.prompts:
        *examples, asked = prompt.split("\n\n")
        assert len(examples) == 2 and all("#### " in example for example in examples)
        assert asked.endswith("\nAnswer:") and "#### " not in asked
    assert len({tuple(prompt.split("\n\n")[:2]) for prompt in engine.prompts}) > 1  # drawn anew for each


def test_prompts_that_are_too_long_are_counted_and_marked(data, tmp_path):
    engine, said = Scripted(), []
    room = len(f"Question: {GSM8K[1][0]}\nAnswer:") + 1 + 256  # the longest but one fits just so, with begin-of-text
    longer = sum(len(question) > len(GSM8K[1][0]) for question, _ in GSM8K)
    result = run(model_of(engine, room), "gsm8k", data, tmp_path, said=said)["gsm8k"]
    assert result["cut"] == longer == 1
    assert (
        f"gsm8k: 1 of 6 prompts are longer than --max-length {room} leaves room for, and lose their beginning" in said
    )
    _, kept = records(tmp_path, "gsm8k")
    assert [i for i in kept if kept[i].get("cut")] == [i for i in range(6) if len(GSM8K[i][0]) > len(GSM8K[1][0])]
    assert max(map(len, engine.prompts)) == room - 256 - 1
    file = next(tmp_path.rglob("gsm8k.jsonl"))  # as an earlier version left it, which cut otherwise
    file.write_text(file.read_text().replace(', "cut": true', ""))
    again = Scripted()
    assert run(model_of(again, room), "gsm8k", data, tmp_path)["gsm8k"]["cut"] == len(again.prompts) == 1
    assert run(model_of(engine), "gsm8k", data, tmp_path / "whole", said=said)["gsm8k"]["cut"] == 0
    with pytest.raises(UserError, match=r"--max-length 5 is less than a window of the task ppl \(8 tokens\)"):
        run(model_of(engine, 5), "ppl", data, tmp_path)


def test_prompts_before_choices_that_are_too_long(data, tmp_path):
    class Rows(Scripted):
        def score(self, rows, batch_size):
            self.rows = [*getattr(self, "rows", []), *rows]
            return super().score(rows, batch_size)

    lengths = [len(f"Question: {problem}\nAnswer:") for problem, _, _ in MATHQA]
    tail = [max(len(c) for c in its["choices"]) for its in benchmark_choices(data, tmp_path)]
    whole = max(
        length + longest + 1 for length, longest in zip(lengths, tail, strict=True)
    )  # and begin-of-text, less one
    for length, cut in ((whole, 0), (whole - 1, 1), (20, 5)):
        engine = Rows()
        result = run(model_of(engine, length), "mathqa", data, tmp_path / str(length))["mathqa"]
        assert result["cut"] == cut
        assert all(row[0] == ByteTokenizer().bos for row in engine.rows), "begin-of-text stays"
        assert max(map(len, engine.rows)) == length + 1


def benchmark_choices(data, tmp_path):
    run(model_of(Scripted()), "mathqa", data, tmp_path / "choices")
    kept = records(tmp_path / "choices", "mathqa")[1]
    return [kept[i] for i in sorted(kept)]


def test_math(data, tmp_path):
    pytest.importorskip("math_verify", reason="extra `eval`")
    replies = dict(
        zip(
            (problem for problem, _, _ in MATH),
            (" $\\boxed{2.0}$", " it is $\\frac{3}{2}$", " \\boxed{(3,\\pi/2)}", " \\boxed{(A)}"),
            strict=True,
        )
    )
    engine = Scripted(lambda prompt: replies[prompt.removeprefix("Problem:\n").removesuffix("\n\nSolution:")])
    result = run(model_of(engine), "math", data, tmp_path)["math"]
    assert result["metrics"]["boxed"]["value"] == 0.5
    assert result["metrics"]["anywhere"]["value"] == 0.75
    assert result["subjects"]["Algebra"]["boxed"]["value"] == 0.5


def test_an_answer_that_takes_too_long_is_judged_once(monkeypatch):
    class Slow:
        timeouts, asked = 0, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def boxed_is(self, text, gold):
            self.timeouts += text == "slow"
            return False

        def text_has(self, text, gold):
            Slow.asked += 1
            return True

    monkeypatch.setattr(tasks, "MathJudge", Slow)
    with tasks.TASKS["math"].grader() as grade:
        assert grade("slow", "1") == {"boxed": 0, "anywhere": 0, "timeout": True}
        assert Slow.asked == 0
        assert grade("quick", "1") == {"boxed": 0, "anywhere": 1, "timeout": False}


def test_byte_order_marks_and_empty_lines_are_passed_over(data, tmp_path):
    mark = codecs.BOM_UTF8
    for path in (data / "gsm8k/test.jsonl", data / "mmlu_math/abstract_algebra_test.csv"):
        path.write_bytes(mark + path.read_bytes().replace(b"\r\n", b"\r\n\r\n"))
    (tmp_path / "marked.jsonl").write_bytes(mark + b'{"text": "abc"}\n')
    (tmp_path / "marked.txt").write_bytes(mark + b"abc")
    model = model_of(Successor())
    assert run(model, "gsm8k,mmlu_math", data, tmp_path)["mmlu_math"]["questions"] == 15
    for name in ("marked.jsonl", "marked.txt"):
        result = run(model, "ppl", data, tmp_path / name[-3:], text=str(tmp_path / name))["ppl-marked"]
        assert result["metrics"]["token_perplexity"]["value"] == pytest.approx(math.exp(-(2 * HALF + REST) / 3))
    (tmp_path / "texts.jsonl").write_bytes(mark + b'{"text": "one"}\n{"text": "two"}\n')
    assert read_texts(tmp_path / "texts.jsonl", "text") == ["one", "two"]


def test_choices_by_hand(tmp_path):
    # After "Answer:" every choice is improbable but for its inner steps: 1 2 3 is likelier than 9 7 5.
    rows = [
        {"problem": "p", "options": "a ) 975 , b ) 123 , c ) 1 , d ) 13579 , e ) 2468", "correct": "c"},
        {"problem": "p", "options": "a ) 975 , b ) 123 , c ) 1 , d ) 13579 , e ) 2468", "correct": "b"},
    ]
    write_jsonl(tmp_path / "data/mathqa/test.jsonl", rows)
    result = run(model_of(Successor()), "mathqa", tmp_path / "data", tmp_path)["mathqa"]
    _, kept = records(tmp_path, "mathqa")
    expected = [4 * REST, 2 * REST + 2 * HALF, 2 * REST, 6 * REST, 5 * REST]  # the space, then byte by byte
    assert kept[0]["logprobs"] == pytest.approx(expected)
    # By the sum c is taken; by characters: 8.3, 4.6, 12.5, 7.5 and 7.8 nats each, so b.
    assert [(kept[i]["acc"], kept[i]["acc_norm"]) for i in range(2)] == [(1, 0), (0, 1)]
    assert result["metrics"]["acc"]["value"] == 0.5


def test_mmlu_prompt_and_subjects(data, tmp_path):
    result = run(model_of(Scripted()), "mmlu_math", data, tmp_path, shots=1)["mmlu_math-1shot"]
    assert result["questions"] == 15 and len(result["subjects"]) == 5
    _, kept = records(tmp_path, "mmlu_math-1shot")
    assert kept[0]["prompt"] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "What is 0 + 0,\nin dev?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: A\n\n"
        "What is 0 + 0,\nin test?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer:"
    )
    assert [len(kept[0]["logprobs"]), kept[2]["right"]] == [4, 2]


def test_perplexity_by_hand(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", [{"a": "abcdefghij", "b": "x"}, {"a": "aa", "b": "ä"}])
    text, template = str(tmp_path / "t.jsonl"), "{a}{b}"
    result = run(model_of(Successor()), "ppl", "", tmp_path, text=text, template=template)["ppl-t"]
    # abcdefghijx: begin -> a, nine steps, j -> x, in windows of 8; aaä: a, a, and two bytes that don't follow.
    logprob, tokens = 9 * HALF + 2 * REST + 4 * REST, 11 + 4
    assert result["metrics"]["token_perplexity"]["value"] == pytest.approx(math.exp(-logprob / tokens))
    assert result["metrics"]["byte_perplexity"]["value"] == pytest.approx(math.exp(-logprob / 15))
    assert result["metrics"]["token_perplexity"]["standard_error"] > 0
    assert len(records(tmp_path, "ppl-t")[1]) == 3


def test_plain_text_is_one_document(tmp_path):
    (tmp_path / "poem.txt").write_text("abc\nabc\n" * 20)
    result = run(model_of(Successor()), "ppl", "", tmp_path, text=str(tmp_path / "poem.txt"), window=32)["ppl-poem"]
    assert result["questions"] == 5
    assert result["metrics"]["token_perplexity"]["value"] == pytest.approx(math.exp(-(HALF + REST) / 2), rel=1e-6)


def test_resuming_computes_only_what_is_missing(data, tmp_path):
    engine = answer_by_question(REPLIES)
    run(model_of(engine), "gsm8k", data, tmp_path, limit=2)
    assert len(engine.prompts) == 2
    path = tmp_path / "out/gsm8k.jsonl"
    path.write_bytes(path.read_bytes() + b'{"index": 2, "answ')  # killed while writing
    said: list[str] = []
    result = run(model_of(engine), "gsm8k", data, tmp_path, said=said)
    assert len(engine.prompts) == 6 and len(set(engine.prompts)) == 6
    assert any("2 of 6 are already there" in line for line in said)
    whole = run(model_of(answer_by_question(REPLIES)), "gsm8k", data, tmp_path / "other")
    assert result["gsm8k"]["metrics"] == whole["gsm8k"]["metrics"]
    again = answer_by_question(REPLIES)
    assert run(model_of(again), "gsm8k", data, tmp_path) == result and not again.prompts
    # A smaller limit counts its own questions only, and takes nothing away from the file.
    said.clear()
    fewer = run(model_of(again), "gsm8k", data, tmp_path, limit=2, said=said)
    assert fewer["gsm8k"]["metrics"]["strict"]["value"] == 0.5
    assert said[-1] == "gsm8k: results.json keeps the numbers over 6 that are already there"
    assert json.loads((tmp_path / "out/results.json").read_text())["tasks"] == result
    # Records that begin anew are all that there is.
    fewer = run(model_of(answer_by_question(REPLIES)), "gsm8k", data, tmp_path, limit=2, fresh=True)
    assert json.loads((tmp_path / "out/results.json").read_text())["tasks"] == fewer


def test_a_second_evaluation_at_the_same_time(data, tmp_path):
    """Of another task it adds its numbers; of the same one it is refused, or waits, and computes nothing twice."""
    seen = []

    def reply(prompt):
        if not seen:
            seen.append("first")
            run(model_of(Scripted()), "mathqa", data, tmp_path)
            with pytest.raises(UserError, match=r"gsm8k\.jsonl: another process is at this evaluation; wait for it"):
                run(model_of(Scripted()), "gsm8k", data, tmp_path, fresh=True)
            later.start()
            while not said:  # until it waits
                time.sleep(0.01)
        return "#### 18"

    def wait():
        model, settings = model_of(Scripted(seen.append)), Settings(data=str(data))
        evaluate(model, choose_tasks("gsm8k"), settings, tmp_path / "out", SOURCE, 8, renew=True, say=said.append)

    said, later = [], threading.Thread(target=wait)
    run(model_of(Scripted(reply)), "gsm8k", data, tmp_path)
    later.join(60)
    assert seen == ["first"]  # the one that waited asked nothing
    assert said == [
        f"{tmp_path}/out/gsm8k.jsonl: another process is at this evaluation; waiting for it",
        "gsm8k: 6 of 6 are already there",
    ]
    assert {*json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]} == {"gsm8k", "mathqa"}
    assert len(records(tmp_path, "gsm8k")[1]) == 6


def test_records_of_another_evaluation_are_refused(data, tmp_path):
    engine = answer_by_question(REPLIES)
    run(model_of(engine), "gsm8k", data, tmp_path)
    with pytest.raises(UserError, match=r"another --max-tokens.*--fresh"):
        run(model_of(engine), "gsm8k", data, tmp_path, max_tokens=9)
    run(model_of(engine), "gsm8k", data, tmp_path, max_tokens=9, fresh=True)
    assert len(engine.prompts) == 12
    write_jsonl(data / "gsm8k/test.jsonl", [{"question": q, "answer": a} for q, a in GSM8K[:3]])
    with pytest.raises(UserError, match="other questions"):
        run(model_of(engine), "gsm8k", data, tmp_path, max_tokens=9)


def test_drawn_answers_are_those_of_their_questions(data, tmp_path):
    """The draws of a question are those of its number, also where others were answered before."""

    class Drawing(Scripted):
        def generate(self, prompts, max_tokens, sampling=None, *, numbers, **options):
            self.reply = lambda prompt: f"{drawn.label if sampling == drawn else None} {next(left)}"
            left = iter(numbers)
            return super().generate(prompts, max_tokens, sampling, numbers=numbers, **options)

    drawn = Sampling(0.2, top_p=0.95, seed=3)
    for limit in (2, None):
        run(model_of(Drawing()), "gsm8k", data, tmp_path, limit, sampling=drawn)
    _, kept = records(tmp_path, "gsm8k")
    assert [kept[i]["answer"] for i in range(6)] == [f"temperature-0.2-top_p-0.95-seed-3 {i}" for i in range(6)]
    with pytest.raises(UserError, match=r"way of drawing.*--fresh"):
        run(model_of(Drawing()), "gsm8k", data, tmp_path, sampling=Sampling(0.3))


def test_results_of_several_tasks_are_kept_together(data, tmp_path):
    run(model_of(Scripted()), "mathqa", data, tmp_path)
    run(model_of(answer_by_question(REPLIES)), "gsm8k,ppl", data, tmp_path)
    content = json.loads((tmp_path / "out/results.json").read_text())
    assert list(content["tasks"]) == ["mathqa", "gsm8k", "ppl"]
    assert content["source"] == SOURCE
    text = table(content["tasks"])
    assert "33.33%" in text and "21.08%" in text  # strict and its standard error


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ("gsm8k,mathqs", {}, "--tasks: 'mathqs' is not a task; choose from gsm8k, math"),
        ("", {}, "no task is named"),
        ("gsm8k", {"data": "nowhere"}, "nowhere/gsm8k/test.jsonl does not exist; --data"),
        ("gsm8k", {"shots": 99}, "has only 6 examples"),
        ("mmlu_math", {"shots": 3}, "abstract_algebra_dev.csv has only 2 examples"),
        ("ppl", {"text": "none.txt"}, "none.txt does not exist"),
        ("ppl", {"text": __file__, "template": "{a}"}, "test_evaluate.py: its name lacks .jsonl, .* --template"),
        ("ppl", {"prompt": "{a}"}, "without --text has no use for --prompt"),
    ],
)
def test_mistakes_are_explained(data, tmp_path, names, settings, message):
    with pytest.raises(UserError, match=message):
        run(model_of(Scripted()), names, settings.pop("data", data), tmp_path, **settings)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "?"}, "line 1: needs a text in the field 'answer'"),
        ("math", {"problem": "?", "solution": "five"}, "line 1: the solution has no .boxed answer"),
        ("mathqa", {"problem": "?", "options": MATHQA[0][1], "correct": "f"}, "'f' is none of its 5 options"),
    ],
)
def test_broken_files_are_named(data, tmp_path, name, row, message):
    write_jsonl(data / name / "test.jsonl", [row])
    with pytest.raises(UserError, match=message):
        run(model_of(Scripted()), name, data, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"What\xe9 is 1?,1,2,3,4,A\r\n", "abstract_algebra_test.csv: not in UTF-8 .* at byte 4"),
        (b"What is 1?,1,2,3," + b"4" * 200_000 + b",A\r\n", "abstract_algebra_test.csv: not CSV"),
        (b"\r\n", "abstract_algebra_test.csv: is empty"),
    ],
)
def test_broken_files_of_mmlu_are_named(data, tmp_path, content, message):
    (data / "mmlu_math/abstract_algebra_test.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        run(model_of(Scripted()), "mmlu_math", data, tmp_path)


@pytest.mark.parametrize(
    ("name", "label"),
    [("my.txt", "ppl-my"), ("my.v2.txt", "ppl-my.v2"), ("a/my.jsonl.gz", "ppl-my"), ("my", "ppl-my")],
)
def test_a_text_names_its_records(name, label):
    assert label_of(tasks.TASKS["ppl"], Settings(text=name)) == label


def test_the_command(tmp_path, data, capsys):
    directory = make_run(tmp_path / "run")
    words = ["eval", str(directory), "--data", str(data), "--batch-size", "8"]
    for option in ("--text", "--template", "--prompt", "--window"):
        assert main([*words, "--tasks", "mathqa", option, "8"]) == 2
        assert f"{option} is for the task ppl; leave it out" in capsys.readouterr().err
    assert main([*words, "--tasks", "mathqa,ppl", "--limit", "4"]) == 0
    shown = capsys.readouterr().out
    assert "mathqa: 4/4 100%" in shown and "token_perplexity" in shown
    folder = directory / "evaluation" / "step-7"
    results = json.loads((folder / "results.json").read_text())
    depth = load_run(directory).config.model.depth
    assert len(results["source"].pop("checkpoint")) == 16
    assert results["source"] == {"step": 7, "tokens": 7 * 32 * 32, "depth": depth, "dtype": "float32"}
    per_token = results["tasks"]["ppl"]["metrics"]["token_perplexity"]["value"]
    assert per_token == results["tasks"]["ppl"]["metrics"]["byte_perplexity"]["value"] > 100  # random weights, bytes

    assert main([*words, "--tasks", "mathqa", "--depth", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mathqa"]["questions"] == 5
    assert (directory / "evaluation" / "step-7-depth-1" / "mathqa.jsonl").is_file()

    # Through a sampler, and drawn: a folder of its own says how, and each setting is another evaluation.
    drawn = ["--tasks", "gsm8k", "--limit", "1", "--max-tokens", "2", "--temperature", "0.2", "--top-p", "0.95"]
    assert main([*words, *drawn, "--sampler", "lossless", "--sampler.guess_depth", "1"]) == 0
    folder = directory / "evaluation" / "step-7-lossless-guess_depth-1-temperature-0.2-top_p-0.95"
    source = json.loads((folder / "results.json").read_text())["source"]
    assert (source["sampler"], source["sampling"]) == ("lossless-guess_depth-1", "temperature-0.2-top_p-0.95")
    assert records(directory / "evaluation", "gsm8k", folder.name)[1][0]["finish"] == "length"
    assert main([*words, "--tasks", "gsm8k", "--cache", "full"]) == 2
    assert "have one rule" in capsys.readouterr().err

    # Two devices find the same.
    before = records(directory / "evaluation", "mathqa", "step-7-depth-1")[1]
    assert main([*words, "--tasks", "mathqa", "--depth", "1", "--mesh.data", "2", "--out", str(tmp_path / "two")]) == 0
    for index, record in records(tmp_path, "mathqa", "two")[1].items():
        assert record["logprobs"] == pytest.approx(before[index]["logprobs"], abs=1e-4)
    assert main([*words, "--tasks", "mathqa", "--mesh.data", "999"]) == 2
    assert "--mesh.data 999 x --mesh.expert 1 is 999 devices" in capsys.readouterr().err

    assert main([*words, "--tasks", "gsm8k", "--tokenizer", str(data / "x.model")]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_records_of_another_evaluation_are_refused_only_where_there_are_some(tmp_path):
    """A command that was refused, or stopped at once, leaves a file without any."""
    path, one, other = (
        tmp_path / "gsm8k.jsonl",
        {"task": "gsm8k", "max_length": 10},
        {"task": "gsm8k", "max_length": 40},
    )
    Records(path, one)
    kept = Records(path, other)
    assert json.loads(path.read_text()) == other
    kept.add([{"index": 0}])
    with pytest.raises(UserError, match=r"holds 1 records of another evaluation \(another max_length\)"):
        Records(path, one)
    for broken in ("[]", "3"):
        path.write_text(f"{broken}\n")
        with pytest.raises(UserError, match="is not a file of records"):
            Records(path, one)


def test_a_limit_takes_as_many_of_every_subject():
    """Files hold one subject after the other; a larger limit keeps the questions of a smaller one."""
    subjects = ["a"] * 5 + ["b"] * 2 + ["c"] * 3
    assert spread(subjects, 4) == [0, 1, 5, 7]
    assert spread(subjects, 8) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert spread(subjects, None) == spread(subjects, 99) == list(range(10))
    assert spread([""] * 6, 3) == [0, 1, 2]
    for limit in range(1, 10):
        assert {*spread(subjects, limit)} < {*spread(subjects, limit + 1)}


def test_what_a_later_task_lacks_is_said_before_the_first_is_answered(data, tmp_path, monkeypatch):
    asked = []
    model = model_of(Scripted(lambda prompt: asked.append(prompt) or ""))
    shutil.rmtree(data / "mathqa")
    with pytest.raises(UserError, match="mathqa"):
        run(model, "gsm8k,mathqa", data, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="the task math needs the package math-verify"):
        run(model, "gsm8k,math", data, tmp_path)
    assert not asked
