"""The loop around a made-up step: going back from diverged steps, full disks, records without gaps or repetition."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dreamer_jax.cli.main import main
from dreamer_jax.config import Config, LoadedConfig
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.config.sections import (
    AnalysisConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    RunConfig,
    SafetyConfig,
    TrainingConfig,
)
from dreamer_jax.errors import RESTART_EXIT_CODE, UserError
from dreamer_jax.parallel import distributed
from dreamer_jax.runs import checkpoints
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.metrics import MetricsWriter, newest_values, read_metrics
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training import checks, clock, loop, recovery
from dreamer_jax.training.console import Console
from dreamer_jax.training.evaluation import Evaluation

BATCHES = 64


class FakeData:
    """Batches that tell their place in the data order."""

    summary, fingerprint, tokenizer = "numbers", "d", SimpleNamespace(fingerprint="t")

    def training_batches(self, start: int, stop: int, rows: range) -> Iterator:
        for position in range(start, stop):
            yield position, {"tokens": np.full((len(rows), 4), position, np.int32)}

    def heldout_records(self, n: int) -> list:
        return []

    harder_records = heldout_records


def abstract(config: Config, mesh) -> TrainState:
    def place(*shape: int, dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    return TrainState(
        place(dtype=jnp.int32),
        {"seen": place(BATCHES)},
        {"mu": place(1)},
        {"balancing": {"expert_attention": place(2)}},
    )


def fresh(config: Config, mesh) -> TrainState:
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, device=leaf.sharding), abstract(config, mesh))


@pytest.fixture
def train(monkeypatch, tmp_path):
    """A function (broken batches, **settings) -> (how often each batch was trained on, the records)."""
    broken: set[int] = set()

    def make_step(config, mesh):
        @jax.jit
        def step(state: TrainState, batch):
            position = batch["tokens"][0, 0]
            bad = jnp.isin(position, jnp.array(sorted(broken) or [-1]))
            seen = jnp.where(bad, state.params["seen"], state.params["seen"].at[position].add(1))
            metrics = {"loss": jnp.where(bad, jnp.nan, position), "gradient_norm": 1.0, "learning_rate": 1.0}
            metrics |= {"counts": {"expert_attention": jnp.ones((1, 2))}, "skipped": bad.astype(jnp.int32)}
            return state.replace(step=state.step + 1, params={"seen": seen}), metrics

        return step

    monkeypatch.setattr(loop, "make_train_step", make_step)
    monkeypatch.setattr(loop, "make_evaluation_step", lambda *_: jax.jit(lambda *_: 0))
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation({}, {}))
    monkeypatch.setattr(loop, "open_data", lambda _: FakeData())
    monkeypatch.setattr(loop, "draw_figures", lambda _: [])
    monkeypatch.setattr(recovery, "create_state", fresh)
    monkeypatch.setattr(recovery, "abstract_state", abstract)
    monkeypatch.setattr(recovery, "SECONDS_BETWEEN_TRIES", (0.0,) * 4)

    def run(bad=(), steps=20, every=4, keep=3, log_every=1, extras=None, sections=None, **safety):
        broken.clear()
        broken.update(bad)
        config = Config(
            training=TrainingConfig(steps=steps, batch_size=2, log_every=log_every),
            checkpoint=CheckpointConfig(every=every, keep=keep),
            safety=SafetyConfig(**safety),
            run=RunConfig(dir=str(tmp_path / "run")),
            **(sections or {}),
        )
        assert loop.train(LoadedConfig(config, {}), extras or loop.Extras()) == 0
        with_meta = Checkpoints(tmp_path / "run", config.checkpoint, {"data": "d", "tokenizer": "t"})
        like = abstract(config, jax.sharding.Mesh(np.array(jax.devices()[:1]), "d"))
        seen = np.asarray(with_meta.restore(like).params["seen"])
        return np.flatnonzero(seen), seen.max(), read_metrics(tmp_path / "run")

    return run


def saved(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "run" / "checkpoints").iterdir() if path.name.isdigit())


def test_undisturbed(train, tmp_path):
    seen, most, records = train()
    assert seen.tolist() == list(range(20)) and most == 1
    assert [record["step"] for record in records] == list(range(1, 21))
    assert saved(tmp_path) == [12, 16, 20]


def test_a_few_skipped_steps_are_counted_and_change_nothing(train):
    seen, _, records = train(bad={2, 3, 9}, skipped_in_a_row=3)
    assert seen.tolist() == [i for i in range(20) if i not in (2, 3, 9)]
    assert [record["step"] for record in records] == list(range(1, 21))
    assert [record["skipped"] for record in records][:4] == [0, 0, 1, 2] and records[-1]["skipped"] == 3
    assert "loss" not in records[2] and records[4]["loss"] == 4, "what isn't finite isn't recorded"


def test_going_back_to_other_data(train, capsys):
    """Batches 9-11 are broken: at step 12 back to 8, and on with batch 12; nothing is recorded twice."""
    seen, most, records = train(bad={9, 10, 11}, skipped_in_a_row=3)
    assert seen.tolist() == [*range(8), *range(12, 24)] and most == 1
    assert [record["step"] for record in records] == list(range(1, 21))
    assert [record["loss"] for record in records] == [*range(8), *range(12, 24)]
    assert [record["rollbacks"] for record in records] == [0] * 8 + [1] * 12
    assert records[-1]["skipped"] == 3
    assert "going back to step 8, which goes on with batch 12" in capsys.readouterr().out


def test_no_checkpoint_within_a_streak(train, tmp_path):
    """The run must be able to go back behind the first skipped step, not just behind the last checkpoint's time."""
    train(bad=range(6, 11), skipped_in_a_row=5, keep=100)
    assert saved(tmp_path) == [4, 8, 12, 16, 20], "step 8 was saved only after going back to step 4"
    _, _, records = train(steps=21)
    assert records[7]["loss"] == 14, "step 8 trained on batch 7 + 7"


def test_stopped_within_a_streak_it_can_still_go_back(train, tmp_path, monkeypatch):
    """Also where one checkpoint is kept: that of the stop doesn't replace the one from before the skipped steps."""
    passed = iter(range(1, BATCHES))
    monkeypatch.setattr(loop.StopRequest, "reached", lambda _: next(passed) == 10)
    with pytest.raises(AssertionError):  # exit code 75
        train(bad={8, 9, 10}, skipped_in_a_row=3, keep=1)
    assert saved(tmp_path) == [8, 10]
    seen, most, records = train(bad={8, 9, 10}, skipped_in_a_row=3, keep=1)
    assert seen.tolist() == [*range(8), *range(11, 23)] and most == 1
    assert [record["step"] for record in records] == list(range(1, 21)) and saved(tmp_path) == [20]


def test_where_a_run_is_in_its_data_survives_a_restart(train):
    train(bad={5, 6}, skipped_in_a_row=2, steps=10)
    seen, most, records = train(steps=20)
    assert seen.tolist() == [*range(4), *range(7, 23)] and most == 1
    assert records[-1]["rollbacks"] == 1 and records[-1]["skipped"] == 2


def test_a_run_goes_back_only_so_often(train, tmp_path):
    with pytest.raises(UserError, match=r"step 14.*gone back 2 times already: training has diverged.*learning_rate"):
        train(bad=range(13, BATCHES), skipped_in_a_row=2, rollbacks=2)
    assert saved(tmp_path) == [4, 8, 12]


def test_without_a_checkpoint_it_goes_back_to_the_start(train):
    seen, _, records = train(bad={1, 2}, skipped_in_a_row=2)
    assert seen.tolist() == list(range(3, 23)) and len(records) == 20


def test_a_full_disk_stops_no_training(train, tmp_path, monkeypatch, capsys):
    """Saves fail until step 30; they are tried again after 1, 2, 4 and more steps, and said each time."""
    tried = []
    probe = Checkpoints._probe

    def full_until_30(self: Checkpoints, needed: int) -> None:
        tried.append(self._step)
        if self._step < 30:
            raise OSError(28, "No space left on device")
        probe(self, needed)

    monkeypatch.setattr(Checkpoints, "_probe", full_until_30)
    seen, _, records = train(steps=45, every=10, keep=100)
    assert seen.tolist() == list(range(45)) and len(records) == 45
    assert tried[0] == 10 and 4 <= len([step for step in tried if step < 30]) <= 10
    assert saved(tmp_path) == sorted({step for step in tried if step >= 30})
    assert capsys.readouterr().out.count("No space left on device; training goes on and will try again") >= 4


@pytest.mark.usefixtures("train")
def test_who_is_asked_to_stop_while_the_last_step_is_saved_tries_no_longer(tmp_path, monkeypatch, capsys):
    """And ends as one who is asked at any other time: to be started again."""
    tried = []

    def full(self: Checkpoints, needed: int) -> None:
        tried.append(self._step)
        if len(tried) == 2:
            signal.raise_signal(signal.SIGTERM)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_probe", full)
    monkeypatch.setattr(recovery, "SECONDS_BETWEEN_TRIES", (0.0,) * 4)
    run = RunConfig(dir=str(tmp_path / "run"))
    config = Config(training=TrainingConfig(steps=4, batch_size=2), checkpoint=CheckpointConfig(every=100), run=run)
    assert loop.train(LoadedConfig(config, {}), loop.Extras()) == RESTART_EXIT_CODE
    assert tried == [4, 4] and "asked to stop, but step 4 could not be saved in 2 attempts" in capsys.readouterr().out


def test_a_disk_that_stays_full_is_an_error_at_the_end(train, tmp_path, monkeypatch):
    def full(self: Checkpoints) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_probe", full)
    with pytest.raises(UserError, match=r"step 20 could not be saved in 5 attempts.*everything after the start"):
        train()
    assert len(read_metrics(tmp_path / "run")) == 20


def test_records_wait_while_the_disk_is_full(tmp_path):
    said: list[str] = []
    writer = MetricsWriter(tmp_path, 0, said.append)
    path = tmp_path / "metrics.jsonl"
    writer.write(1, {"loss": 1.0})
    path.rename(tmp_path / "aside")
    path.symlink_to("/dev/full")
    writer.write(2, {"loss": 2.0})
    writer.write(3, {"loss": 3.0})
    path.unlink()
    (tmp_path / "aside").rename(path)
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # what an attempt may have left
    writer.write(4, {"loss": 4.0})
    writer.close()
    assert [record["loss"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert len(said) == 2 and "can't be written" in said[0] and "3 records are caught up" in said[1]


def test_damaged_checkpoints_are_not_trained_over(train, tmp_path):
    """With nothing good left, training must not start over in silence and overwrite the record."""
    train(steps=8)
    for step in saved(tmp_path):
        metadata = tmp_path / "run" / "checkpoints" / str(step) / "meta" / "metadata"
        metadata.write_bytes(metadata.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"all checkpoints .* are damaged"):
        train(steps=12)
    assert len(read_metrics(tmp_path / "run")) == 8


def test_going_back_does_not_start_over_either(train, tmp_path, monkeypatch):
    """Where all checkpoints are damaged by then: it would remove them, and the record."""
    batches = FakeData.training_batches

    def damaging(self: FakeData, start: int, stop: int, rows: range) -> Iterator:
        for position, batch in batches(self, start, stop, rows):
            if position == 11:
                for step in saved(tmp_path):
                    metadata = tmp_path / "run" / "checkpoints" / str(step) / "meta" / "metadata"
                    metadata.write_bytes(metadata.read_bytes()[:-1])
            yield position, batch

    with monkeypatch.context() as patch, pytest.raises(AssertionError):  # exit code 75
        patch.setattr(loop.StopRequest, "reached", lambda _: True)
        train()
    monkeypatch.setattr(FakeData, "training_batches", damaging)
    with pytest.raises(UserError, match=r"all checkpoints .* are damaged"):
        train(bad={9, 10, 11}, skipped_in_a_row=3, every=100)
    assert saved(tmp_path) == [1]


def test_a_damaged_checkpoint_counts_no_longer(train, tmp_path, capsys):
    train(steps=12, keep=2)
    path = tmp_path / "run" / "checkpoints" / "12" / "meta" / "metadata"
    path.write_bytes(path.read_bytes()[:-1])
    seen, most, records = train(steps=20, keep=2)
    assert "checkpoint 12 can't be used: meta/metadata has" in capsys.readouterr().out
    assert seen.tolist() == list(range(20)) and most == 1 and len(records) == 20
    assert saved(tmp_path) == [16, 20]


class Slow:
    """A function, compiled or not, that takes so many seconds of a made-up clock."""

    def __init__(self, function: Any, now: list[float], seconds: float):
        self._function, self._now, self._seconds = function, now, seconds

    def lower(self, *arguments: Any) -> Slow:
        return Slow(self._function.lower(*arguments), self._now, self._seconds)

    def compile(self) -> Slow:
        self._now[0] += 10_000
        return Slow(self._function.compile(), self._now, self._seconds)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._now[0] += self._seconds
        return self._function(*arguments, **options)


def test_throughput_and_time_left_are_those_of_the_steps(train, monkeypatch):
    """Nothing that is done between steps falls together with the lines of the log, or with anything else."""
    now, shown = [0.0], []
    for module in (loop, clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    make = loop.make_train_step
    monkeypatch.setattr(loop, "make_train_step", lambda *of: Slow(make(*of), now, 2))
    monkeypatch.setattr(loop, "evaluate", Slow(lambda *_: Evaluation({"heldout/loss": 1.0}, {}), now, 100))
    for name in ("save", "save_now"):
        original = getattr(recovery.Recovery, name)
        slow = lambda *of, original=original, **options: Slow(original, now, 30)(*of, **options)  # noqa: E731
        monkeypatch.setattr(recovery.Recovery, name, slow)
    monkeypatch.setattr(Console, "progress", lambda _, step, record, left: shown.append((step, now[0] + left)))
    observer = Slow(jax.jit(lambda *_: 0), now, 7)
    probe = SimpleNamespace(observer=observer, sample=lambda batch: {"tokens": batch["tokens"][:1]})
    probe.scalars = lambda sums, balancing: {"seen": 1.0}
    benchmarks = Slow(lambda *_: {"eval/gsm8k/strict": 0.0}, now, 1000)
    extras = loop.Extras(benchmarks=benchmarks, probe=lambda *_: probe)
    sections = {"evaluation": EvaluationConfig(every=6, tasks_every=5), "analysis": AnalysisConfig(every=3)}
    _, _, records = train(steps=21, every=7, log_every=4, extras=extras, sections=sections)
    tokens = 2 * Config().data.sequence_length
    rates = {record["step"]: record["time/tokens_per_second"] for record in records if "loss" in record}
    assert rates == pytest.approx(dict.fromkeys((1, 4, 8, 12, 16, 20, 21), tokens / 2))
    assert [step for step, _ in shown] == list(rates)
    assert [end for step, end in shown if step >= 8] == pytest.approx([now[0]] * 5)  # all have come once by then


@pytest.mark.parametrize("other", ["configuration", "data"])
def test_hosts_of_other_settings_or_files_are_refused(train, monkeypatch, tmp_path, other):
    """Each updates its part of the weights by its own settings, and reads its rows by a plan of its own: records would
    come twice, and the run couldn't be resumed."""
    mesh, asked = loop.make_mesh(MeshConfig()), []

    def gather(its):
        asked.append(its)
        differs = other == ("configuration", "data")[len(asked) - 1]
        return np.stack([its, its + differs, its])

    monkeypatch.setattr(loop, "make_mesh", lambda _: mesh)
    monkeypatch.setattr(distributed.jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    said = {
        "configuration": "the configuration of process 1 is another than",
        "data": "tokenizer of process 1 are others",
    }
    with pytest.raises(UserError, match=said[other]):
        train()
    monkeypatch.undo()
    assert not (tmp_path / "run").exists()


def test_hosts_may_keep_their_files_elsewhere_and_must_agree_on_the_rest(monkeypatch):
    texts, config = [], Config(data=DataConfig(source="jsonl", path="here"))
    monkeypatch.setattr(checks, "others_than_the_first", lambda text: texts.append(text) or [])
    for changed in ({}, {"path": "elsewhere", "tokenizer": "elsewhere.json"}, {"sequence_length": 7}):
        data = dataclasses.replace(config.data, **changed)
        checks.check_alike(dataclasses.replace(config, data=data), FakeData())
    settings = texts[::2]
    assert settings[0] == settings[1] != settings[2]


def test_an_error_of_one_process_asks_the_others_nothing(train, monkeypatch):
    """They are in the next step: an exchange of its own would meet theirs, and the error would never be said."""
    began = []

    def with_an_end(self, start, stop, rows):
        yield from ((at, {"tokens": np.full((len(rows), 4), at, np.int32)}) for at in range(start, 5))
        began.append(True)
        raise UserError("a record can't be read")

    monkeypatch.setattr(FakeData, "training_batches", with_an_end)
    monkeypatch.setattr(checkpoints, "largest", lambda value: pytest.fail("asked") if began else int(value))
    monkeypatch.setattr(checkpoints.jax, "process_count", lambda: 2 if began else 1)
    with pytest.raises(UserError, match="a record can't be read"):
        train(every=4, log_every=100)
    monkeypatch.undo()
    assert began


def test_fewer_steps_end_a_run_at_an_earlier_checkpoint(train, monkeypatch, tmp_path, capsys):
    """The records and the summary are those of its last step, which is evaluated though none was due there; once."""
    train(steps=18, every=4)
    shutil.rmtree(tmp_path / "run/checkpoints/18")
    evaluated = []

    def evaluate(step, place, state, data):
        evaluated.append(int(state.step))
        return Evaluation({"heldout/loss": 0.5}, {})

    monkeypatch.setattr(loop, "evaluate", evaluate)
    seen, _, records = train(steps=16, every=4)
    assert seen.tolist() == list(range(16)) and evaluated == [16]
    assert [record["step"] for record in records] == [*range(1, 17), 16] and records[-1]["heldout/loss"] == 0.5
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["step"], summary["loss"], summary["heldout/loss"]) == (16, 15, 0.5)
    assert "records of the steps after 16 are removed" in capsys.readouterr().out
    assert train(steps=16, every=4)[2] == records and evaluated == [16]


def test_a_run_is_trained_by_one_process(train, tmp_path):
    """Whoever comes second is told, and disturbs nothing; a killed one leaves no lock."""
    train(steps=4)
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", holding, str(tmp_path / "run/.lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        before = read_metrics(tmp_path / "run")
        with pytest.raises(UserError, match=r"run: is being trained; wait for it, or name another"):
            train(steps=8)
        assert main(["checkpoint", "prune", str(tmp_path / "run")]) == 2
        assert read_metrics(tmp_path / "run") == before and saved(tmp_path) == [4]
        other.kill()
    assert train(steps=8)[0].tolist() == list(range(8))


def test_settings_are_looked_at_when_a_run_goes_on_too(train):
    train(steps=4)
    rows = {"recurrence": RecurrenceConfig(draw="uniform", by="row", groups=4)}
    with pytest.raises(UserError, match="groups: the 2 rows that a device computes at once"):
        train(steps=8, sections=rows)


def test_the_summary_mixes_no_evaluations(tmp_path):
    """Values that aren't finite are left out of records: what is there of an earlier evaluation isn't theirs."""
    writer = MetricsWriter(tmp_path, 0)
    writer.write(8, {"loss": 2.0, "experts/gini": 0.5})
    writer.write(8, {"heldout/loss": 2.0, "heldout/perplexity": 7.4, "eval/ppl/loss": 3.0})
    writer.write(16, {"loss": 1.0})
    writer.write(16, {"heldout/loss": 800.0, "heldout/perplexity": float("inf")})
    writer.close()
    expected = {"step": 16, "loss": 1.0, "experts/gini": 0.5, "heldout/loss": 800.0, "eval/ppl/loss": 3.0}
    assert newest_values(read_metrics(tmp_path)) == expected


def test_a_summary_is_not_replaced_by_nothing(train, tmp_path, capsys):
    train(steps=4)
    before = (tmp_path / "run/summary.json").read_text()
    (tmp_path / "run/metrics.jsonl").unlink()
    train(steps=4)
    assert (tmp_path / "run/summary.json").read_text() == before
    assert "has no records of training any more; summary.json stays as it is" in capsys.readouterr().out
