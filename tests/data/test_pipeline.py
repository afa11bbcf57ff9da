"""Batches as a pure function of (configuration, seed, step), the held-out split, and the messages of open_data."""

import base64
import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.config import load_config
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig, EvaluationConfig, RunConfig, TrainingConfig
from dreamer_jax.data import Batch, Data, Record, open_data
from dreamer_jax.data.tasks import is_heldout
from dreamer_jax.data.tokenizers import encode_pair
from dreamer_jax.errors import ConfigError, UserError
from tests.outside import SAMPLES, sample, write_rank_file

GSM8K = SAMPLES / "gsm8k/train.jsonl"
S, B = 96, 4


def make(*, seed: int = 0, batch_size: int = B, harder: int = 0, vocab_size: int = 259, **data) -> Config:
    return Config(
        model=DreamerConfig(vocab_size=vocab_size),
        data=DataConfig(**{"sequence_length": S, "heldout_records": 20, **data}),
        training=TrainingConfig(batch_size=batch_size),
        evaluation=EvaluationConfig(harder=harder),
        run=RunConfig(seed=seed),
    )


def write_records(path: Path, n: int, extra: tuple[dict, ...] = ()) -> str:
    records = [{"question": f"what is {i} + {i}?", "answer": f"{2 * i} " * (1 + i % 7)} for i in range(n)]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, *extra]))
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write_records(tmp_path / "train.jsonl", 120)


@pytest.fixture(params=["task", "jsonl"])
def config(request: pytest.FixtureRequest, jsonl: str) -> Config:
    return make(source=request.param, path=jsonl if request.param == "jsonl" else "")


def digest(batch: Batch) -> str:
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()


def documents(data: Data, batch: Batch) -> list[Record]:
    """Read the documents back from the arrays alone, checking every array on the way."""
    tokenizer, records = data.tokenizer, []
    for r in range(len(batch["tokens"])):
        row = {name: array[r] for name, array in batch.items()}
        padding = row["segment_ids"] == 0
        assert (row["tokens"][padding] == tokenizer.pad).all() and (row["targets"][padding] == tokenizer.pad).all()
        assert not row["loss_mask"][padding].any() and not row["answer_mask"][padding].any()
        assert not padding[: (~padding).sum()].any(), "padding is at the end"
        for segment in range(1, row["segment_ids"].max() + 1):
            (places,) = np.nonzero(row["segment_ids"] == segment)
            assert (np.diff(places) == 1).all() and len(places)
            assert (row["positions"][places] == np.arange(len(places))).all()
            tokens, targets, answer = (row[name][places] for name in ("tokens", "targets", "answer_mask"))
            assert (tokens[1:] == targets[:-1]).all()
            assert tokens[0] == tokenizer.bos and targets[-1] == tokenizer.eos
            first = int(np.argmax(answer))
            assert answer[first:].all() and not answer[:first].any()
            records.append(Record(tokenizer.decode(tokens[: first + 1]), tokenizer.decode(targets[first:])))
    return records


def test_batches_are_a_function_of_seed_and_step_alone(config: Config) -> None:
    expected = [digest(open_data(config).batch_at(step)) for step in range(12)]
    assert len(set(expected)) == 12
    data = open_data(config)
    for step in (7, 0, 11, 7, 3):
        assert digest(data.batch_at(step)) == expected[step]
    rows = {row.tobytes() for step in range(3) for row in data.batch_at(step)["tokens"]}
    assert len(rows) == 3 * B
    for start in (0, 5, 11):
        steps = [(step, digest(batch)) for step, batch in data.training_batches(start, 12)]
        assert steps == list(enumerate(expected))[start:]
    other = open_data(dataclasses.replace(config, run=RunConfig(seed=1)))
    assert digest(other.batch_at(0)) != expected[0]
    assert other.fingerprint != data.fingerprint == open_data(config).fingerprint


@pytest.mark.parametrize("data", [{}, {"loss": "answer"}])
def test_copies_stand_one_after_the_other_and_the_last_is_asked(data: dict) -> None:
    plain, thrice = (open_data(make(copies=copies, **data)) for copies in (1, 3))
    assert plain.fingerprint != thrice.fingerprint
    heldout = zip(plain.heldout_batches(), thrice.heldout_batches(), strict=True)
    for one, wide in ((plain.batch_at(2), thrice.batch_at(2)), *heldout):
        for name in one:
            assert wide[name].shape == (B, 3 * S) and wide[name].dtype == one[name].dtype
        for copy in range(3):
            its = {name: wide[name][:, copy::3] for name in one}
            for name in ("tokens", "targets", "segment_ids"):
                np.testing.assert_array_equal(its[name], one[name])
            filled = one["segment_ids"] > 0
            np.testing.assert_array_equal(its["positions"][filled], 3 * one["positions"][filled] + copy)
            for mask in ("loss_mask", "answer_mask"):
                np.testing.assert_array_equal(its[mask], one[mask] & (copy == 2))


def test_task_rows_do_not_depend_on_the_batch_size() -> None:
    small, large = open_data(make()).batch_at(5), open_data(make(batch_size=9)).batch_at(5)
    for name in small:
        assert (large[name][:B] == small[name]).all()


def test_stopping_early_stops_the_threads(config: Config) -> None:
    data = open_data(config)
    before = threading.active_count()
    batches = data.training_batches(0, 10_000)
    first = list(itertools.islice(batches, 3))
    assert [step for step, _ in first] == [0, 1, 2]
    batches.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
    assert list(data.training_batches(3, 3)) == []


def test_task_batches_hold_only_training_instances_and_all_difficulties() -> None:
    data = open_data(make(task="boolean", difficulty=3))
    records = [record for step in range(20) for record in documents(data, data.batch_at(step))]
    assert not any(is_heldout(prompt) for prompt, _ in records)
    nesting = Counter(str(np.cumsum([(c == "(") - (c == ")") for c in prompt]).max()) for prompt, _ in records)
    assert set(nesting) == {"1", "2", "3"}
    assert min(nesting.values()) > len(records) / 3 * 0.8
    fill = np.mean([(data.batch_at(step)["segment_ids"] > 0).mean() for step in range(20)])
    assert fill > 0.85


@pytest.mark.parametrize("task", ["boolean", "arithmetic", "reachability"])
def test_task_heldout_and_harder(task: str) -> None:
    data = open_data(make(task=task, difficulty=2, harder=4))
    heldout, harder = data.heldout_records(100), data.harder_records(100)
    assert len(heldout) == len(harder) == 20
    assert len(data.heldout_records(3)) == 3
    for records, batches in ((heldout, data.heldout_batches()), (harder, data.harder_batches())):
        assert all(is_heldout(record.prompt) for record in records)
        found = [record for batch in batches for record in documents(data, batch)]
        assert Counter(found) == Counter(records)
    lengths = [len(record.prompt) for record in heldout]
    assert np.mean([len(record.prompt) for record in harder]) > max(lengths) * 0.9
    assert list(open_data(make(task=task)).harder_batches()) == []


def test_heldout_batches_are_fixed_full_shape_and_shared_by_seeds(config: Config) -> None:
    data = open_data(config)
    first = [digest(batch) for batch in data.heldout_batches()]
    assert first == [digest(batch) for batch in data.heldout_batches()]
    other = open_data(dataclasses.replace(config, run=RunConfig(seed=3)))
    assert first == [digest(batch) for batch in other.heldout_batches()]
    batches = list(open_data(dataclasses.replace(config, training=TrainingConfig(batch_size=7))).heldout_batches())
    assert all(batch["tokens"].shape == (7, S) for batch in batches)
    assert (batches[-1]["segment_ids"][-1] == 0).all(), "this case has a batch that needs padding rows"


def test_copies_of_heldout_records_are_not_trained_on(tmp_path: Path) -> None:
    """A file may hold a record twice; the summary says how many copies are left out, and others keep their order."""
    once = write_records(tmp_path / "once.jsonl", 120)
    plain = open_data(make(source="jsonl", path=once))
    assert "0 skipped" in plain.summary
    lines = Path(once).read_text().splitlines()
    (tmp_path / "twice.jsonl").write_text("\n".join(line for line in lines for _ in range(2)))
    data = open_data(make(source="jsonl", path=str(tmp_path / "twice.jsonl")))
    heldout = {record.prompt for record in data.heldout_records(1000)}
    twins = 20 - (len(data.heldout_records(1000)) - len(heldout)) * 2  # whose copy isn't held out, too
    assert len(heldout) < 21 and f"{twins} skipped ({twins} copies of held-out records)" in data.summary
    seen = {record.prompt for step in range(60) for record in documents(data, data.batch_at(step))}
    assert data.epoch_at(60) > 0 and seen == {f"what is {i} + {i}?\n" for i in range(120)} - heldout
    (tmp_path / "same.jsonl").write_text("\n".join(lines[:1] * 40))
    with pytest.raises(UserError, match="every record to train on is a copy of one that is held out"):
        open_data(make(source="jsonl", path=str(tmp_path / "same.jsonl")))


def test_no_heldout_records() -> None:
    data = open_data(make(heldout_records=0))
    assert list(data.heldout_batches()) == [] and data.heldout_records(5) == []


def test_jsonl_epochs_and_split(jsonl: str) -> None:
    lines = [json.loads(line) for line in Path(jsonl).read_text().splitlines()]
    everything = {Record(line["question"] + "\n", line["answer"]) for line in lines}
    data = open_data(make(source="jsonl", path=jsonl))
    heldout = set(data.heldout_records(1000))
    assert len(heldout) == 20
    in_file = [Record(line["question"] + "\n", line["answer"]) in heldout for line in lines]
    assert 0 < sum(in_file[:60]) < 20, "drawn from the whole file, which may be sorted"
    assert {record for batch in data.heldout_batches() for record in documents(data, batch)} == heldout
    train = everything - heldout
    stream = [record for step in range(60) for record in documents(data, data.batch_at(step))]
    epochs = len(stream) // 100
    assert epochs >= 3
    for epoch in range(epochs):  # epochs are joined end to end, without a gap or a partial batch
        assert set(stream[epoch * 100 : (epoch + 1) * 100]) == train
    assert stream[:100] != stream[100:200]


def test_jsonl_heldout_file(tmp_path: Path, jsonl: str) -> None:
    other = write_records(tmp_path / "heldout.jsonl", 3)
    data = open_data(make(source="jsonl", path=jsonl, heldout_path=other))
    assert [record.prompt for record in data.heldout_records(9)] == [f"what is {i} + {i}?\n" for i in range(3)]
    assert "117 records to train on, 3 held out" in data.summary
    assert "3 copies of held-out records" in data.summary
    both = open_data(make(source="jsonl", path=jsonl, heldout_path=jsonl))
    assert "120 records to train on, 120 held out" in both.summary
    missing = make(source="jsonl", path=jsonl, heldout_path=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"data\.heldout_path: .*none\.jsonl does not exist"):
        open_data(missing)


def test_loss_on_the_answer_only(jsonl: str) -> None:
    everything = open_data(make(source="jsonl", path=jsonl))
    answers = open_data(make(source="jsonl", path=jsonl, loss="answer"))
    all_batch, answer_batch = everything.batch_at(0), answers.batch_at(0)
    assert (all_batch["loss_mask"] == (all_batch["segment_ids"] > 0)).all()
    assert (answer_batch["loss_mask"] == all_batch["answer_mask"]).all()
    assert 0 < answer_batch["loss_mask"].sum() < all_batch["loss_mask"].sum()
    assert answers.fingerprint != everything.fingerprint


def test_records_longer_than_a_row_are_left_out_and_counted(tmp_path: Path) -> None:
    longest = {"question": "q" * 40, "answer": "a" * (S - 42)}  # with \n and bos exactly a row
    too_long = {"question": "q" * 40, "answer": "a" * (S - 41)}
    path = write_records(tmp_path / "train.jsonl", 20, (longest, too_long))
    data = open_data(make(source="jsonl", path=path, heldout_records=0))
    assert "1 too long for a row" in data.summary
    answers = {record.completion for step in range(20) for record in documents(data, data.batch_at(step))}
    assert longest["answer"] in answers and too_long["answer"] not in answers


def test_plain_text_is_split_without_losing_a_target(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text[: 100 * i]}) + "\n" for i in range(1, 11)))
    config = make(source="jsonl", path=str(path), prompt="", completion="{text}", heldout_records=0, batch_size=1)
    data = open_data(config)
    targets = sum(100 * i + 1 for i in range(1, 11))
    assert f"{targets:,} tokens" in data.summary and "0 too long" in data.summary
    rows = int(data.summary.split(" rows an epoch")[0].split()[-1])
    batches = [data.batch_at(step) for step in range(rows)]
    assert sum(int(batch["loss_mask"].sum()) for batch in batches) == targets
    assert sum(int((batch["targets"] == data.tokenizer.eos).sum()) for batch in batches) == 10
    assert all((batch["answer_mask"] == batch["loss_mask"]).all() for batch in batches)


def test_skipped_records_are_in_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    write_records(path, 40)
    path.write_text(path.read_text() + '{"question": 1}\nnonsense\n{}\n')
    with pytest.raises(UserError, match=r"record 41 \(line 41\)"):
        open_data(make(source="jsonl", path=str(path)))
    summary = open_data(make(source="jsonl", path=str(path), on_error="skip")).summary
    assert "20 records to train on, 20 held out" in summary
    assert "3 skipped (1 not JSON, 1 with a field that isn't text, 1 without a field)" in summary


def test_fingerprint_follows_the_content_not_the_path(tmp_path: Path, jsonl: str) -> None:
    same = write_records(tmp_path / "copy.jsonl", 120)
    other = write_records(tmp_path / "other.jsonl", 121)
    first = open_data(make(source="jsonl", path=jsonl)).fingerprint
    assert open_data(make(source="jsonl", path=same)).fingerprint == first
    assert open_data(make(source="jsonl", path=other)).fingerprint != first
    assert open_data(make(source="jsonl", path=jsonl, batch_size=8)).fingerprint != first
    tasks = [make(), make(difficulty=3), make(task="arithmetic"), make(sequence_length=128)]
    assert len({open_data(config).fingerprint for config in tasks}) == 4


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"vocab_size": 258}, "model.vocab_size", "258 is too small for tokenizer bytes.*259 or more"),
        ({"task": "reachability", "difficulty": 12}, "data.difficulty", "12 is more than reachability has; at most 11"),
        ({"harder": 17}, "evaluation.harder", "17 is more than boolean has"),
        ({"difficulty": 5, "sequence_length": 40}, "data.sequence_length", "40 is too short.*use at least 77"),
        ({"harder": 6}, "data.sequence_length", r"\(evaluation\.harder\); use at least 125"),
        ({"source": "puzzle", "copies": 2}, "data.copies", "whose parts stand once; leave it at 1"),
    ],
)
def test_settings_that_cannot_work(settings: dict, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_data(make(**settings))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heldout_records": 120}, "120 usable records, too few to hold out data.heldout_records 120"),
        ({"completion": "answer"}, "data.completion: 'answer' names no field"),
        ({"prompt": "{question"}, "data.prompt: a lone {"),
        ({"prompt": "{text}"}, "has no field 'text', which data.prompt names"),
        ({"sequence_length": 8}, "every training record is longer than a row of 8"),
    ],
)
def test_jsonl_settings_that_cannot_work(jsonl: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_data(make(source="jsonl", path=jsonl, **settings))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(UserError, match="pip install grain"):
        next(open_data(make()).training_batches(0, 1))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (tmp_path / "ranks").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match="pip install tiktoken"):
        open_data(make(tokenizer=str(tmp_path / "ranks")))


def test_the_room_needs_neither_jax_nor_the_optional_packages() -> None:
    code = (
        "import sys, dreamer_jax.data as d; from dreamer_jax.config.sections import Config; "
        "from dreamer_jax.config.models.dreamer import DreamerConfig; "
        "d.open_data(Config(model=DreamerConfig(vocab_size=259))).batch_at(0); "
        "print([m for m in ('jax', 'flax', 'grain', 'tiktoken') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "[]\n"


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_rank_file(tmp_path_factory.mktemp("ranks")))


def test_gsm8k_with_a_rank_file(rank_file: str) -> None:
    data = open_data(make(source="jsonl", path=str(GSM8K), tokenizer=rank_file, sequence_length=768, vocab_size=1253))
    assert "102 records to train on, 20 held out" in data.summary
    assert "0 skipped, 0 too long" in data.summary
    fill = np.mean([(data.batch_at(step)["segment_ids"] > 0).mean() for step in range(50)])
    assert fill > 0.93
    everything = {Record(line["question"] + "\n", line["answer"]) for line in sample("gsm8k/train")}
    heldout = set(data.heldout_records(20))
    train = set(documents(data, data.batch_at(123)))
    assert train <= everything and heldout <= everything and not train & heldout


def test_the_shipped_configuration_reads_what_it_always_read(rank_file: str, tmp_path: Path) -> None:
    """Prompt and completion are encoded apart. With another fingerprint, runs made before couldn't be gone on with."""
    config = load_config("gsm8k_dr_da").config
    section = dataclasses.replace(config.data, path=str(GSM8K), tokenizer=rank_file, heldout_records=20)
    data = open_data(dataclasses.replace(config, data=section))
    other = 0
    for record in data.heldout_records(20):
        prompt, completion = encode_pair(data.tokenizer, *record)
        assert record.prompt.endswith("\nAnswer: ") and data.tokenizer.decode(prompt[-1:]) == " "
        other += prompt + completion != data.tokenizer.encode(record.prompt + record.completion)
    assert other  # an answer's first word and the space before it can be one token
    # Merges that stand here, because those of a training could change with the package tokenizers.
    merges = [b"th", b"the", b" the", b"12", b"123", b"an", b" an", b"in", b"er", b"re"]
    lines = [
        base64.b64encode(token) + b" %d\n" % rank
        for rank, token in enumerate([*(bytes([i]) for i in range(256)), *merges])
    ]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    section = dataclasses.replace(section, tokenizer=str(tmp_path / "tokenizer.model"))
    assert (
        open_data(dataclasses.replace(config, data=section)).fingerprint
        == "f7528533bfa492507e3ffb3bf0e8db9145c87a9500209cf163cca673444ba6c3"
    )
