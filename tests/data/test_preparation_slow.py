"""Ten kills of a preparation and of a training stream, and memory on a gigabyte: minutes, so not run by default."""

import random
import signal
import time
from pathlib import Path

import pytest

from dreamer_jax.benchmarks.data import bench_data
from dreamer_jax.data import open_data
from tests.data.preparing import contents, problems, run, start, write_lines, write_mixture
from tests.data.test_mixing import config, expected_rows, stream

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    records = problems(150_000, seed=5)
    write_lines(folder / "a.jsonl", records + records[:500])
    write_lines(folder / "test.jsonl", records[1000:1200])
    return write_mixture(
        folder / "m.yaml",
        f"""\
        sources: {{a: {{path: {folder}/a.jsonl}}}}
        decontaminate: {{benchmarks: {{test: {{path: {folder}/test.jsonl}}}}}}
        """,
    )


def steps_of(out: Path) -> set[str]:
    """The steps of a preparation that have begun."""
    return {path.name.split("-")[0] for path in (out / "work").glob("*")}


def test_ten_kills_of_a_preparation(mixture: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    whole = start(mixture, tmp_path / "whole", 2)
    output = whole.communicate()[0]
    assert whole.returncode == 0, output
    seconds = time.monotonic() - started
    rng, kills, steps = random.Random(0), 0, set()
    out = tmp_path / "out"
    while kills < 10:
        process = start(mixture, out, rng.choice([1, 2, 4]))
        if kills % 2:  # in a step after the first, as soon as there is one
            while process.poll() is None and steps_of(out) <= {"unit"}:
                time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05 if kills % 2 else 0.35) * seconds)
        if process.poll() is not None:  # it was done before its kill; begin anew in another directory
            assert contents(out) == contents(tmp_path / "whole")
            out = tmp_path / f"out{kills}"
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        assert not (out / "index.json").exists()
        steps.add(frozenset(steps_of(out)))
    report = run(mixture, out, 2)
    assert contents(out) == contents(tmp_path / "whole")
    assert report["total"]["read"] == 150_500
    assert len(steps) >= 2, "kills in different steps"


def test_ten_kills_of_a_training_stream(mixture: Path, tmp_path: Path) -> None:
    run(mixture, tmp_path / "data", 2)
    rng = random.Random(1)
    phases = [(processes, rng.uniform(0, 0.3)) for processes in (1, 4, 2, 1, 8, 2, 4, 1, 2, 4)]
    seen = stream(tmp_path / "data", tmp_path, phases)
    data = open_data(config(tmp_path / "data"))
    assert sorted(seen) == list(range(len(seen)))
    for step, rows in seen.items():
        assert rows == expected_rows(data, step)


def test_memory_is_flat_in_the_size_of_the_corpus() -> None:
    """On a gigabyte of generated text no process takes notably more than on a tenth of it."""
    peaks = []
    for megabytes in (100, 1000):
        found = bench_data("", "bytes", megabytes, 2, 20, 4096, say=print)
        peaks.append(max(found["prepare"]["peak_megabytes"].values()))
        print(megabytes, found)
    assert peaks[1] < 1.3 * peaks[0] + 100
