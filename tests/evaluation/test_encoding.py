"""Evaluation reads prompts and completions as training did: the same tokens, wherever the space between them stands."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.config import LoadedConfig, load_config, to_yaml
from dreamer_jax.config.sections import Config, DataConfig
from dreamer_jax.data import Record
from dreamer_jax.data.jsonl import JsonlReader, Template
from dreamer_jax.data.sources import to_document
from dreamer_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from dreamer_jax.evaluation import Settings, evaluate, training_hook
from dreamer_jax.evaluation.encoding import harness_pair, rolling_windows
from dreamer_jax.evaluation.opening import subject_of
from dreamer_jax.evaluation.runner import choose_tasks
from dreamer_jax.evaluation.tasks import TASKS
from dreamer_jax.inference import Generated, LanguageModel
from tests.evaluation.cases import GSM8K, Scripted, model_of, write_benchmarks
from tests.export.cases import make_run
from tests.outside import SAMPLES, write_rank_file

TEMPLATES = {
    True: ("Question: {question}\nAnswer: ", "{answer}"),
    False: ("Question: {question}\nAnswer:", " {answer}"),
}
BYTES = ByteTokenizer()
BOTH = pytest.mark.parametrize("space", [True, False], ids=["space ends the prompt", "space begins the completion"])


class Words(ByteTokenizer):
    """A word or number is one token, together with the space before it; so is any other character."""

    def __init__(self):
        self._known: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        parts = re.findall(r" ?\w+|\W", text)
        return [self._known.setdefault(part, 300 + len(self._known)) for part in parts]


class Watching(Scripted):
    """Keeps the tokens of all that it is asked."""

    def __init__(self):
        super().__init__()
        self.rows: list[list[int]] = []

    def generate(self, prompts, max_tokens, *rest, **options):
        self.rows += map(list, prompts)
        return [Generated([], [], "stop") for _ in prompts]

    def score(self, rows, batch_size):
        self.rows += map(list, rows)
        return super().score(rows, batch_size)


def run_config(space: bool) -> Config:
    """Trained on GSM8K's solutions."""
    prompt, completion = TEMPLATES[space]
    return Config(data=DataConfig(source="jsonl", path="train.jsonl", prompt=prompt, completion=completion))


def asked(tmp_path: Path, task: str, space: bool) -> tuple[list[list[int]], Words]:
    """All rows of a task for a model that was trained so, with its tokenizer."""
    engine, tokenizer, data = Watching(), Words(), tmp_path / "data"
    subject = subject_of(run_config(space), str(tmp_path), 1, {})
    settings = Settings(data=str(write_benchmarks(data)), space_in_prompt=subject.space_in_prompt)
    model = LanguageModel(engine, tokenizer, 4096)
    evaluate(model, choose_tasks(task), settings, tmp_path / "out", {}, 4096, say=lambda line: None)
    return engine.rows, tokenizer


def trained(tokenizer: Words, space: bool, question: str, answer: str) -> list[int]:
    """A document as training reads it."""
    prompt, completion = (
        Template(text, "").fill({"question": question, "answer": answer}) for text in TEMPLATES[space]
    )
    return to_document(Record(prompt, completion), tokenizer).tokens.tolist()


@BOTH
def test_perplexity_reads_the_documents_of_training(tmp_path, space):
    rows, tokenizer = asked(tmp_path, "ppl", space)
    documents = [trained(tokenizer, space, *solved)[:-1] for solved in GSM8K]  # the end isn't predicted
    assert sorted(rows) == sorted(documents)
    whole = [[tokenizer.bos, *tokenizer.encode(f"Question: {q}\nAnswer: {a}")] for q, a in GSM8K]
    assert (sorted(whole) == sorted(documents)) is not space, "the case tells the two apart"


@BOTH
def test_a_choice_is_read_as_a_completion(tmp_path, space):
    rows, tokenizer = asked(tmp_path, "mmlu_math", space)
    colon, blank = tokenizer.encode(":")[0], tokenizer.encode(" ")[0]
    ends = [[colon, blank, *tokenizer.encode(c)] if space else [colon, *tokenizer.encode(f" {c}")] for c in "ABCD"]
    assert len(rows) == 60 and all(any(row[-len(end) :] == end for end in ends) for row in rows)


@BOTH
def test_generation_begins_where_prompts_ended(tmp_path, space):
    rows, tokenizer = asked(tmp_path, "gsm8k", space)
    prompts = [[tokenizer.bos, *tokenizer.encode(TEMPLATES[space][0].format(question=q))] for q, _ in GSM8K]
    assert sorted(rows) == sorted(prompts)
    assert all(trained(tokenizer, space, *solved)[: len(p)] == p for solved, p in zip(GSM8K, prompts, strict=True))


def test_the_task_ppl_takes_a_prompt(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"q": "to be", "a": "or not"}) + "\n")
    settings = Settings(text=str(tmp_path / "t.jsonl"), prompt="{q}, ", template="{a}")
    tokenizer = Words()
    (window,) = TASKS["ppl"].items(settings, tokenizer, 99)
    assert (
        window.tokens
        == [*tokenizer.encode("to be, "), *tokenizer.encode("or not")]
        != tokenizer.encode("to be, or not")
    )
    assert window.bytes == len("to be, or not")


def test_an_empty_choice_is_not_certain(tmp_path):
    engine = Watching()
    questions = TASKS["mathqa"].items(Settings(str(write_benchmarks(tmp_path / "data"))), ByteTokenizer(), 9)
    empty = dataclasses.replace(questions[0], choices=("", "b"))
    with TASKS["mathqa"].answerer(Settings(space_in_prompt=True), model_of(engine)) as answer:
        (record,) = answer([empty])
    assert record["logprobs"][0] < 0


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"source": "jsonl", "prompt": "{question} "}, True),
        ({"source": "jsonl", "prompt": "{question}\n"}, False),
        ({"source": "jsonl", "prompt": "", "completion": "{text}"}, False),
        ({"source": "prepared", "prompt": "{question} "}, False),
        ({"source": "task", "prompt": "{question} "}, False),
    ],
)
def test_where_the_space_stood_in_training(data, expected):
    config = Config(data=DataConfig(path="there" if data["source"] != "task" else "", **data))
    assert subject_of(config, "run", 3, {}).space_in_prompt is expected


def spaced_run(directory: Path) -> Path:
    """A run with random weights, as if it had been trained on prompts that end in a space."""
    make_run(directory)
    config = load_config(directory / "config.yaml").config
    data = dataclasses.replace(config.data, source="jsonl", path="train.jsonl", prompt="{question}\nAnswer: ")
    (directory / "config.yaml").write_text(to_yaml(LoadedConfig(dataclasses.replace(config, data=data), {})))
    return directory


def test_the_command_asks_as_the_run_was_trained(tmp_path):
    data, directory = write_benchmarks(tmp_path / "data"), spaced_run(tmp_path / "run")
    words = ["eval", str(directory), "--data", str(data), "--tasks", "mathqa", "--limit", "1"]
    assert main(words) == 0
    _, record = (directory / "evaluation/step-7/mathqa.jsonl").read_text().splitlines()
    assert json.loads(record)["prompt"].endswith("\nAnswer: ")


def test_training_does_anew_what_was_asked_otherwise(tmp_path, monkeypatch, capsys):
    """Records of an older program must not stop a run that goes on."""
    monkeypatch.setattr("dreamer_jax.inference.Engine", lambda *_, **__: Watching())
    monkeypatch.setattr("dreamer_jax.inference.fold", lambda *_: None)
    config = run_config(space=True)
    section = dataclasses.replace(config.evaluation, tasks="mathqa", data=str(write_benchmarks(tmp_path / "data")))
    config = dataclasses.replace(config, evaluation=section, run=dataclasses.replace(config.run, dir=str(tmp_path)))
    benchmarks = training_hook.during_training(config)
    first = benchmarks(3, None, None)
    path = tmp_path / "evaluation/step-3/mathqa.jsonl"
    header, *records = path.read_text().splitlines()
    assert json.loads(records[0])["prompt"].endswith("\nAnswer: ")
    path.write_text("\n".join([json.dumps({**json.loads(header), "items": "others"}), records[0], ""]))
    assert benchmarks(3, None, None) == first
    assert path.read_text().splitlines()[0] == header and len(path.read_text().splitlines()) == 1 + len(records)
    assert "already there" not in capsys.readouterr().out
    benchmarks(3, None, None)
    assert "5 of 5 are already there" in capsys.readouterr().out


def test_gsm8k_with_a_rank_file(tmp_path):
    """The shipped configuration: perplexity over the test file is that of documents as training makes them."""
    config = load_config("gsm8k").config.data
    tokenizer = load_tokenizer(str(write_rank_file(tmp_path)))
    templates = (Template(config.prompt, "data.prompt"), Template(config.completion, "data.completion"))
    documents = [
        to_document(record, tokenizer).tokens
        for record in JsonlReader(SAMPLES / "gsm8k/test.jsonl", "data.path", *templates, "stop")
    ]
    settings = Settings(data=str(SAMPLES), space_in_prompt=True)
    windows = TASKS["ppl"].items(settings, tokenizer, 1 << 20)
    assert len(windows) == len(documents) == 63
    for window, tokens in zip(windows, documents, strict=True):
        np.testing.assert_array_equal([*window.context, *window.tokens], tokens[:-1])


@pytest.mark.parametrize(
    ("context", "text", "expected"),
    [
        ("ab", "cd", ("ab", "cd")),
        ("", "ab", ("", "ab")),
        ("a ", "b", ("a", " b")),  # the space belongs to what is scored
        ("ab", "", ("ab", "")),
        ("\u00e4", "b", ("\u00e4", "b")),  # both bytes are context
    ],
)
def test_pairs_of_the_harness(context, text, expected):
    given, scored = expected
    assert harness_pair(BYTES, context, text) == ([BYTES.bos, *given.encode()], list(scored.encode()))


class Merging(ByteTokenizer):
    """Writes "ab" as one token where it stands together."""

    def encode(self, text: str) -> list[int]:
        ids = list(text.encode())
        return ids if text != "ab" else [200]


def test_a_token_across_the_border_is_left_to_the_context_as_the_harness_does():
    """Together they are as long as the context alone, so nothing is left to score."""
    assert harness_pair(Merging(), "a", "b") == ([BYTES.bos, ord("a")], [])


def test_windows_predict_every_token_once():
    # The harness's own example: ten tokens, a window of four.
    windows = rolling_windows(BYTES, "0123456789", 4)
    as_text = [(bytes(t for t in context if t < 256).decode(), bytes(text).decode()) for context, text in windows]
    assert as_text == [("", "0123"), ("3", "4567"), ("567", "89")]
    assert windows[0][0] == [BYTES.bos]
    assert rolling_windows(BYTES, "", 4) == []
    assert rolling_windows(BYTES, "abcd", 4) == [([BYTES.bos], list(b"abcd"))]
