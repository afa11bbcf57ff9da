"""How fast data are prepared and fed, and in how much memory: `dreamer bench data`."""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.sections import Config, DataConfig, TrainingConfig
from dreamer_jax.data.mixture import load_mixture
from dreamer_jax.data.pipeline import open_data
from dreamer_jax.data.preparation import prepare
from dreamer_jax.data.prepared import read_index
from dreamer_jax.data.tokenizers import load_tokenizer

_WORDS = re.findall(
    r"\w+",
    "the a of to and in is that for it was on are as with they be at this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people "
    "my than first water been call who oil its now find long down day did get come made may part apples boxes "
    "students price total train hours miles speed garden square length width area sum difference product ratio "
    "average half twice remaining ",
)


def bench_data(
    mixture: str, tokenizer: str, megabytes: int, workers: int, steps: int, row_length: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time tokenizing, preparing and feeding.

    Args:
        mixture: a mixture file, or "" for generated text.
        tokenizer: of generated text.
        megabytes: of generated text.
        workers: processes of the preparation.
        steps: batches of 32 rows that are fed.
        row_length: S.
        say: prints progress.
    Returns:
        Tokens a second by wall clock and by CPU time, and the peak memory of a process in MB.
    """
    with tempfile.TemporaryDirectory(prefix="dreamer-bench-") as folder:
        if not mixture:
            mixture = _generate(Path(folder), tokenizer, megabytes)
            say(f"generated {megabytes} MB of text")
        found: dict[str, Any] = {"workers": workers}
        spec = load_mixture(mixture).tokenizer
        wall, cpu = time.perf_counter(), _cpu_seconds()
        report = prepare(mixture, Path(folder) / "data", workers, say=say)
        found["prepare"] = _speed(report["total"]["read_tokens"], wall, cpu) | {
            "records": report["total"]["read"],
            "peak_megabytes": {
                "main": _peak(resource.RUSAGE_SELF),
                "worker": _peak(resource.RUSAGE_CHILDREN) if workers > 1 else 0,
            },
        }
        found["pipeline"] = _feed(Path(folder) / "data", spec, steps, row_length)
        found["tokenizer"] = _tokenize(Path(folder) / "data", spec)
    return found


def _feed(directory: Path, tokenizer: str, steps: int, row_length: int) -> dict[str, Any]:
    vocabulary = read_index(directory, "bench data")["tokenizer"]["vocab_size"]
    data = open_data(
        Config(
            model=DreamerConfig(vocab_size=vocabulary),
            data=DataConfig(
                source="prepared",
                path=str(directory),
                tokenizer=tokenizer,
                sequence_length=row_length,
                heldout_records=0,
            ),
            training=TrainingConfig(batch_size=32),
        )
    )
    data.batch_at(0)  # plans the first round
    tokens, wall, cpu = 0, time.perf_counter(), _cpu_seconds()
    for _, batch in data.training_batches(0, steps):
        tokens += int((batch["segment_ids"] > 0).sum())
    return _speed(tokens, wall, cpu) | {"steps": steps, "rows": 32, "row_length": row_length}


def _tokenize(directory: Path, spec: str, records: int = 5000) -> dict[str, Any]:
    """One thread on texts of the prepared data."""
    from dreamer_jax.data.prepared import PreparedData

    tokenizer = load_tokenizer(spec)
    data = PreparedData(directory, tokenizer, "bench data")
    texts = [tokenizer.decode(tokens.tolist()) for tokens in data.tokens(range(min(records, len(data))))]
    wall, cpu = time.perf_counter(), _cpu_seconds()
    return _speed(sum(len(tokenizer.encode(text)) for text in texts), wall, cpu)


def _generate(folder: Path, tokenizer: str, megabytes: int) -> str:
    """Problems of some hundred words as JSONL, and a mixture that names them."""
    rng, written, number = Random(0), 0, 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        while written < megabytes * 1_000_000:
            number += 1
            question = _sentences(rng, 40, number)
            written += file.write(json.dumps({"question": question, "answer": _sentences(rng, 80, number)}) + "\n")
    path = json.dumps(str(folder / "text.jsonl"))
    (folder / "mixture.yaml").write_text(
        f"tokenizer: {json.dumps(tokenizer)}\nsources:\n  generated: {{path: {path}}}\n"
    )
    return str(folder / "mixture.yaml")


def _sentences(rng: Random, words: int, number: int) -> str:
    chosen = [rng.choice(_WORDS) for _ in range(words)]
    for place in range(7, words, 8):
        chosen[place] = f"{rng.randrange(1000)} + {number % 997} = {rng.randrange(2000)}."
    return " ".join(chosen)


def _cpu_seconds() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _peak(who: int) -> int:
    """Peak resident memory in MB; of children, the largest one's."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return round(resource.getrusage(who).ru_maxrss * unit / 1e6)


def _speed(tokens: int, wall: float, cpu: float) -> dict[str, Any]:
    seconds, cpu_seconds = time.perf_counter() - wall, _cpu_seconds() - cpu
    return {
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
    }
