"""Training on prepared data: mixtures, packing, purity by step, processes, damage."""

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig, RunConfig, TrainingConfig
from dreamer_jax.data import Batch, Data, open_data
from dreamer_jax.data.mixing import Rounds, round_counts
from dreamer_jax.data.packing import ConcatPlan, EpochRows
from dreamer_jax.errors import ConfigError, UserError
from tests.data.preparing import ROOT, problems, run, write_lines, write_mixture

S, B = 256, 8


def config(path: Path | str, *, seed: int = 0, batch_size: int = B, **data) -> Config:
    return Config(
        model=DreamerConfig(vocab_size=259),
        data=DataConfig(
            **{"source": "prepared", "path": str(path), "sequence_length": S, "heldout_records": 20, **data}
        ),
        training=TrainingConfig(batch_size=batch_size),
        run=RunConfig(seed=seed),
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_lines(folder / "a.jsonl", problems(300, seed=1))
    write_lines(folder / "b.jsonl", problems(100, seed=2))
    (folder / "c.txt").write_text("".join(f"line {i} of a plain text\n" for i in range(2000)))
    mixture = write_mixture(
        folder / "mixture.yaml",
        f"""\
        sources:
          a: {{path: {folder}/a.jsonl}}
          b: {{path: {folder}/b.jsonl, epochs: 2}}
          c: {{path: {folder}/c.txt, prompt: "", completion: "{{text}}"}}
        """,
    )
    run(mixture, folder / "data")
    return folder


def digest(batch: Batch) -> str:
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()


def documents(data: Data, batch: Batch) -> list[str]:
    """Every document (or piece) of a batch as text, from targets and first inputs."""
    found = []
    for r, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == segment)
            assert (batch["positions"][r][places] == np.arange(len(places))).all()
            tokens = batch["tokens"][r][places]
            assert (tokens[1:] == batch["targets"][r][places][:-1]).all()
            found.append(data.tokenizer.decode([tokens[0], *batch["targets"][r][places]]))
    return found


def test_rounds_take_every_document_equally_often() -> None:
    groups = [np.arange(10), np.arange(10, 17)]
    rounds = Rounds(groups, [4, 14], seed=3)
    stream = [rounds(number).tolist() for number in range(20)]
    assert [sum(d < 10 for d in documents) for documents in stream] == [4] * 20
    firsts = [d for documents in stream for d in sorted(documents) if d < 10]
    counts = Counter(firsts)
    assert set(counts) == set(range(10)) and set(counts.values()) == {8}
    assert all(
        Counter(d for d in documents if d >= 10) == Counter(dict.fromkeys(range(10, 17), 2)) for documents in stream
    )
    assert Rounds(groups, [4, 14], seed=3)(13).tolist() == stream[13]
    assert Rounds(groups, [4, 14], seed=4)(13).tolist() != stream[13]
    changes = [sum((x < 10) != (y < 10) for x, y in pairwise(ds)) for ds in stream]
    assert max(changes) > 4, "sources are mixed within a round, not one after the other"
    # Two rounds and a half are an epoch of the first source: within it nothing comes twice.
    assert len({d for documents in stream[:2] for d in documents if d < 10}) == 8


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([{}, {}], [100, 50]),
        ([{"epochs": 2.5}, {}], [250, 50]),
        ([{"tokens": 500}, {"epochs": 0.5}], [50, 25]),
        ([{"weight": 1}, {"weight": 1}], [100, 5]),  # 1,000 and 10,000 tokens
        ([{"weight": 1}, {"weight": 20}], [50, 50]),
    ],
)
def test_round_counts(shares: list[dict[str, float]], expected: list[int]) -> None:
    whole = [{"weight": 0.0, "epochs": 0.0, "tokens": 0.0} | share for share in shares]
    assert round_counts(whole, [100, 50], [1000, 10_000]) == expected


@pytest.mark.parametrize(
    ("weights", "documents", "tokens"),
    [
        ([0.5, 0.499, 0.001], [10, 1000, 100_000], [1000, 100_000, 10_000_000]),
        ([0.5, 0.49, 0.01], [20, 10**6, 10**5], [4000, 6 * 10**8, 3 * 10**8]),
        ([0.5, 0.3, 0.2], [1, 300, 300], [700, 300_000, 135_000]),
        ([0.5, 0.5], [1000, 0], [1000, 0]),  # nothing of the second fits into a row
        ([0.6, 0.3, 0.1], [0, 500, 300], [0, 50_000, 24_000]),
        ([1.0, 1.0], [10, 1000], [1000, 56_179]),  # 17.8 documents a round
    ],
)
def test_weights_are_the_shares_of_the_tokens(weights: list[float], documents: list[int], tokens: list[int]) -> None:
    counts = round_counts([{"weight": w, "epochs": 0.0, "tokens": 0.0} for w in weights], documents, tokens)
    taken = [c * size / n if n else 0.0 for c, size, n in zip(counts, tokens, documents, strict=True)]
    asked = [weight if n else 0.0 for weight, n in zip(weights, documents, strict=True)]
    assert [t / sum(taken) for t in taken] == pytest.approx([w / sum(asked) for w in asked], rel=0.02)
    assert sum(counts) >= 1 and all(count == 0 for count, n in zip(counts, documents, strict=True) if not n)


def test_a_round_is_not_empty_and_whole_counts_are_rounded() -> None:
    shares = [{"weight": 0.0, "epochs": epochs, "tokens": 0.0} for epochs in (0.01, 0.002)]
    assert round_counts(shares, [10, 10], [1000, 1000]) == [1, pytest.approx(0.2)]
    nearly = [{"weight": 0.0, "epochs": 0.99996, "tokens": 0.0}]  # as always: int where rounding changes little
    (count,) = round_counts(nearly, [300], [1000])
    assert count == 300 and isinstance(count, int)


def test_counts_that_are_not_whole_are_kept_over_the_rounds() -> None:
    groups = [np.arange(10), np.arange(10, 1010), np.arange(1010, 2010)]
    rounds = Rounds(groups, [10, 9.98, 0.25], seed=0)
    stream = [rounds(number) for number in range(100)]
    taken = [[int(((d >= g[0]) & (d <= g[-1])).sum()) for d in stream] for g in groups]
    assert set(taken[0]) == {10} and set(taken[1]) == {9, 10} and sum(taken[1]) == 998
    assert taken[2] == [0, 0, 0, 1] * 25
    assert len(np.unique(np.concatenate(stream))) == 10 + 998 + 25, "each document once before any comes again"
    assert Rounds(groups, [10, 9.98, 0.25], seed=0)(57).tolist() == stream[57].tolist()


def test_concat_plan_covers_every_input_once() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 50)
    plan = ConcatPlan(lengths, 32)
    pieces = [piece for row in range(len(plan)) for piece in plan.pieces(row)]
    for row in range(len(plan) - 1):
        assert sum(piece.length for piece in plan.pieces(row)) == 32
    for document, length in enumerate(lengths.tolist()):
        own = [piece for piece in pieces if piece.document == document]
        assert [piece.first for piece in own] == np.cumsum([0, *(p.length for p in own)])[:-1].tolist()
        assert sum(piece.length for piece in own) == length
    assert len(ConcatPlan(np.zeros(0, np.int64), 32)) == 0
    rows = EpochRows(lengths, 32, seed=0, packing="concat")
    count = rows.rows_in_epoch(0)
    assert rows.epoch(count - 1) == 0 and rows.epoch(count) == 1


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_a_round_holds_every_document_as_often_as_the_mixture_says(prepared: Path, packing: str) -> None:
    data = open_data(config(prepared / "data", packing=packing, heldout_records=0, batch_size=1))
    steps = 0
    while data.epoch_at(steps) == 0:
        steps += 1
    batches = [data.batch_at(step) for step in range(steps)]
    everything = "".join(text for batch in batches for text in documents(data, batch))
    trained = sum(int(batch["loss_mask"].sum()) for batch in batches)
    index = json.loads((prepared / "data" / "index.json").read_text())
    inputs = {name: s["document_tokens"] - s["records"] for name, s in index["sources"].items()}
    assert trained == inputs["a"] + 2 * inputs["b"] + inputs["c"], "no token lost or repeated"
    if packing == "best_fit":
        texts = Counter(text for batch in batches for text in documents(data, batch))
        for seed, n, times in ((1, 300, 1), (2, 100, 2)):
            assert all(texts[f"{p['question']}\n{p['answer']}"] == times for p in problems(n, seed))
    else:
        assert all((batch["segment_ids"] > 0).all() for batch in batches[:-1]), "full rows"
    assert everything.count("of a plain text") >= 1800


def test_answer_masks_of_cut_documents(prepared: Path) -> None:
    whole = open_data(config(prepared / "data", heldout_records=0, batch_size=1, loss="answer"))
    cut = open_data(config(prepared / "data", heldout_records=0, batch_size=1, loss="answer", packing="concat"))
    totals = []
    for data in (whole, cut):
        steps = next(step for step in range(10_000) if data.epoch_at(step) == 1)
        totals.append(sum(int(data.batch_at(step)["loss_mask"].sum()) for step in range(steps)))
    assert totals[0] == totals[1]


def test_batches_are_a_function_of_seed_and_step(prepared: Path) -> None:
    for packing in ("best_fit", "concat"):
        settings = config(prepared / "data", packing=packing)
        expected = [digest(open_data(settings).batch_at(step)) for step in range(100)]
        assert open_data(settings).epoch_at(99) >= 1, "the steps cross the border of a round"
        data = open_data(settings)
        for step in (17, 0, 99, 3):
            assert digest(data.batch_at(step)) == expected[step]
        assert [digest(batch) for _, batch in data.training_batches(5, 100)] == expected[5:]
        other = open_data(dataclasses.replace(settings, run=RunConfig(seed=1)))
        assert digest(other.batch_at(0)) != expected[0] and other.fingerprint != data.fingerprint
    for processes in (1, 2, 4, 8):
        slices = [data.rows_of_process(process, processes) for process in range(processes)]
        for step in (0, 83):
            parts = [data.batch_at(step, rows) for rows in slices]
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            assert digest(joined) == expected[step]
    with pytest.raises(UserError, match="can't be shared by 3 processes"):
        data.rows_of_process(0, 3)


def test_heldout_records_are_never_trained_on(prepared: Path) -> None:
    data = open_data(config(prepared / "data"))
    heldout = {record.prompt + record.completion for record in data.heldout_records(100)}
    assert len(heldout) == 20
    trained = {text for step in range(40) for text in documents(data, data.batch_at(step))}
    assert len(trained) > 300 and not heldout & trained
    assert sum(len(documents(data, batch)) for batch in data.heldout_batches()) >= 20
    same = open_data(config(prepared / "data", heldout_path=str(prepared / "data")))
    assert len(same.heldout_records(10_000)) >= 400
    assert same.fingerprint != data.fingerprint


def long_and_short(folder: Path) -> Path:
    """60 short problems, and 60 with an answer of over 400 bytes."""
    records = problems(120, seed=9)
    for record in records[::2]:
        record["answer"] = "So it is. " * 40 + record["answer"]
    write_lines(folder / "a.jsonl", records)
    write_lines(folder / "long.jsonl", records[::2])
    sources = f"{{a: {{path: {folder}/a.jsonl}}, long: {{path: {folder}/long.jsonl, prompt: 'Q {{question}}'}}}}"
    more = "deduplicate: {exact: false, near: false}"
    run(write_mixture(folder / "m.yaml", f"sources: {sources}\n{more}"), folder / "data")
    return folder / "data"


def test_heldout_records_that_are_too_long_are_counted(tmp_path: Path) -> None:
    """With concat too, which cuts those of training."""
    path = long_and_short(tmp_path)
    split = open_data(config(path, heldout_records=90))
    assert "180 records, 90 held out" in split.summary and "120 too long for a row" in split.summary
    data = open_data(config(path, heldout_records=90, packing="concat"))
    found = re.search(r"90 held out.* (\d+) too long for a row", data.summary)
    assert found and int(found[1]) == 90 - len(data.heldout_records(1000)) > 0
    write_lines(tmp_path / "x.jsonl", [{"question": "1+1?", "answer": "2"}] * 3)
    more = "deduplicate: {exact: false, near: false}"
    run(write_mixture(tmp_path / "x.yaml", f"sources: {{x: {{path: {tmp_path}/x.jsonl}}}}\n{more}"), tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"every held-out record of .*data is longer than a row of 64"):
        open_data(config(tmp_path / "tiny", heldout_path=str(path), sequence_length=64))


def test_a_weighted_source_that_is_too_long_takes_no_part(tmp_path: Path) -> None:
    path = long_and_short(tmp_path)
    text = "sources: {a: {path: x, weight: 0.5}, long: {path: x, weight: 0.5}}"
    data = open_data(config(path, heldout_records=0, mixture=str(write_mixture(tmp_path / "w.yaml", text))))
    assert "a 100.0% (1.00 epochs), long 0.0% (0.00 epochs)" in data.summary
    only = write_mixture(tmp_path / "only.yaml", "sources: {long: {path: x}}")
    with pytest.raises(UserError, match=r"every training record of \S+only\.yaml is longer than a row of"):
        open_data(config(path, heldout_records=0, mixture=str(only)))
    for share in ("epochs: 1e9", "tokens: 1e30"):
        huge = write_mixture(tmp_path / "huge.yaml", f"sources: {{a: {{path: x, {share}}}}}")
        with pytest.raises(UserError, match=r"a round of these shares holds \S+ documents \(60 different ones\)"):
            open_data(config(path, heldout_records=0, mixture=str(huge)))


def test_a_mixture_file_overrides_the_shares(prepared: Path) -> None:
    other = write_mixture(
        prepared / "other.yaml",
        f"sources:\n  b: {{path: {prepared}/b.jsonl, weight: 3}}\n  a: {{path: {prepared}/a.jsonl, weight: 1}}\n",
    )
    data = open_data(config(prepared / "data", mixture=str(other), heldout_records=0))
    assert "c " not in data.summary and "(1.00 epochs)" in data.summary
    steps = next(step for step in range(1000) if data.epoch_at(step) == 2)
    texts = Counter(text for step in range(steps) for text in documents(data, data.batch_at(step)))
    from_b = {f"{p['question']}\n{p['answer']}" for p in problems(100, 2)}
    share = sum(len(t) * n for t, n in texts.items() if t in from_b) / sum(len(t) * n for t, n in texts.items())
    assert abs(share - 0.75) < 0.03
    other.write_text("sources:\n  z: {path: z.jsonl}\n")
    with pytest.raises(UserError, match=r"names the source z, which .* lacks; it holds a, b, c"):
        open_data(config(prepared / "data", mixture=str(other)))


def test_nothing_is_held_out_of_sources_that_take_no_part(prepared: Path) -> None:
    only = write_mixture(prepared / "only_b.yaml", f"sources: {{b: {{path: {prepared}/b.jsonl}}}}")
    data = open_data(config(prepared / "data", mixture=str(only)))
    of_b = {p["question"] for p in problems(100, 2)}
    held = data.heldout_records(1000)
    assert len(held) == 20 and all(record.prompt.strip() in of_b for record in held)
    assert "100 records, 20 held out" in data.summary
    everything = open_data(config(prepared / "data"))
    named = write_mixture(prepared / "named.yaml", "sources: {a: {path: x}, b: {path: x, epochs: 2}, c: {path: x}}")
    assert open_data(config(prepared / "data", mixture=str(named))).fingerprint == everything.fingerprint


def copy(prepared: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(prepared / "data"), str(to)], check=True)
    return to


def test_damage_is_refused(prepared: Path, tmp_path: Path) -> None:
    whole = copy(prepared, tmp_path / "data")
    shard = whole / "shards" / "a-00000.array_record"
    content = shard.read_bytes()
    for cut in (len(content) // 2, len(content) - 1, 0):
        shard.write_bytes(content[:cut])
        with pytest.raises(UserError, match=r"a-00000\.array_record: has [\d,]+ bytes instead of .*cut short"):
            open_data(config(whole))
    place = next(i for i in range(1000, len(content)) if 0 not in content[i : i + 64])  # among the compressed tokens
    shard.write_bytes(content[:place] + bytes(64) + content[place + 64 :])
    data = open_data(config(whole, heldout_records=0))
    with pytest.raises(UserError, match="a record can't be read"):
        for step in range(100):
            data.batch_at(step)
    shard.unlink()
    with pytest.raises(UserError, match=r"a-00000\.array_record: is missing"):
        open_data(config(whole))
    shard.write_bytes(content)
    (whole / "shards" / "b-00000.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match=r"b-00000\.npy: can't be read"):
        open_data(config(whole))
    index = json.loads((whole / "index.json").read_text())
    source = index["sources"]["a"]
    for name, change in {
        "sources": {"sources": []},
        "dtype": {"dtype": "<f2"},
        r"tokenizer\.name": {"tokenizer": {}},
        r"sources\.a\.weight": {"sources": {"a": {**source, "weight": None}}},
        r"sources\.a\.shards\.name": {"sources": {"a": {**source, "shards": ["a-00000"]}}},
    }.items():
        (whole / "index.json").write_text(json.dumps({**index, **change}))
        with pytest.raises(UserError, match=rf"index\.json is damaged: {name} is .*; prepare again"):
            open_data(config(whole))
    (whole / "index.json").write_text("{")
    with pytest.raises(UserError, match="not the index of prepared data"):
        open_data(config(whole))
    (whole / "index.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="is of format 99"):
        open_data(config(whole))


def test_settings_that_cannot_work(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path: no directory"):
        open_data(config(tmp_path / "none"))
    with pytest.raises(UserError, match=r"data\.path: .* holds no index\.json; prepared data are made by"):
        open_data(config(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.path: is empty; data\.source prepared needs a directory"):
        config("")
    with pytest.raises(ConfigError, match=r"data\.mixture: only prepared data are mixed, and data\.source is task"):
        config("", source="task", mixture="m.yaml")
    with pytest.raises(ConfigError, match=r"every training record .* is longer than a row of 8"):
        write_lines(tmp_path / "a.jsonl", problems(5))
        run(write_mixture(tmp_path / "m.yaml", f"sources: {{a: {{path: {tmp_path}/a.jsonl}}}}"), tmp_path / "five")
        open_data(config(tmp_path / "five", sequence_length=8, heldout_records=0))


STREAM = """
import hashlib, sys, time
sys.path.insert(0, {root!r})
from tests.data.test_mixing import config
from dreamer_jax.data import open_data
path, process, processes, start, log = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
data = open_data(config(path))
with open(log, "a") as file:
    for step, batch in data.training_batches(start, 10**9, data.rows_of_process(process, processes)):
        rows = [hashlib.sha256(b"".join(batch[n][r].tobytes() for n in sorted(batch))).hexdigest()
                for r in range(len(batch["tokens"]))]
        file.write(" ".join([str(step), *rows]) + "\\n")
        file.flush()
"""


def stream(path: Path, folder: Path, phases: list[tuple[int, float]]) -> dict[int, list[str]]:
    """Feed from several processes, kill -9 all after a while, go on with another number of them, and so on.

    Returns:
        step -> hash of every row of the global batch, as the processes saw them.
    """
    seen: dict[int, list[str]] = {}
    done = 0
    for phase, (processes, seconds) in enumerate(phases):
        logs = [folder / f"{phase}-{process}.log" for process in range(processes)]
        words = [sys.executable, "-c", STREAM.format(root=str(ROOT)), str(path)]
        running = [
            subprocess.Popen([*words, str(process), str(processes), str(done), str(log)], cwd=ROOT)
            for process, log in enumerate(logs)
        ]
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if all(log.exists() and log.read_text().count("\n") >= 3 for log in logs):
                break
            assert all(process.poll() is None for process in running)
            time.sleep(0.02)
        time.sleep(seconds)
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        lines = [[line.split() for line in log.read_text().split("\n")[:-1]] for log in logs]
        complete = min(len(own) for own in lines)
        assert complete > 0
        for i in range(complete):
            assert {int(own[i][0]) for own in lines} == {done + i}
            seen[done + i] = [row for own in lines for row in own[i][1:]]
        done += complete
    return seen


def expected_rows(data: Data, step: int) -> list[str]:
    batch = data.batch_at(step)
    return [hashlib.sha256(b"".join(batch[n][r].tobytes() for n in sorted(batch))).hexdigest() for r in range(B)]


@pytest.mark.slow  # starts nine processes; tests/data/test_preparation.py has a kill, too
def test_killed_and_resumed_with_other_numbers_of_processes(prepared: Path, tmp_path: Path) -> None:
    seen = stream(prepared / "data", tmp_path, [(1, 0.0), (4, 0.0), (2, 0.0)])
    data = open_data(config(prepared / "data"))
    assert len(seen) >= 9 and sorted(seen) == list(range(len(seen)))
    for step, rows in list(seen.items())[:300]:
        assert rows == expected_rows(data, step)
