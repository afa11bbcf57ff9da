"""Corpora with planted records, and helpers for the tests of preparation."""

import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

from dreamer_jax.data.preparation import prepare
from dreamer_jax.data.prepared import PreparedData
from dreamer_jax.data.tokenizers import ByteTokenizer

ROOT = Path(__file__).resolve().parents[2]
NOUNS = ["apples", "pears", "wagons", "lamps", "bottles", "ropes", "tiles", "stamps", "coins", "kites", "boats"]
VERBS = ["buys", "sells", "paints", "counts", "borrows", "loses", "finds", "carries", "packs", "stacks", "lends"]
PLACES = ["market", "harbour", "library", "garden", "station", "museum", "school", "bakery", "theatre", "workshop"]


def problem(rng: random.Random) -> dict[str, str]:
    """A word problem; two of them hardly ever share many words."""
    words = [rng.choice(NOUNS + VERBS + PLACES) for _ in range(20)]
    a, b = rng.randrange(2, 900), rng.randrange(2, 900)
    question = (
        f"At the {' '.join(words[:8])} there are {a} {words[8]} and {b} {words[9]}. How many {' '.join(words[10:])}?"
    )
    return {"question": question, "answer": f"We add them: {a} + {b} = {a + b}.\n#### {a + b}"}


def problems(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Different word problems."""
    rng = random.Random(seed)
    return [problem(rng) for _ in range(n)]


def write_lines(path: Path, records: list) -> Path:
    """Records (or bytes, as they are) as JSONL."""
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records))
    return path


def write_mixture(path: Path, text: str) -> Path:
    """A mixture file."""
    path.write_text(textwrap.dedent(text))
    return path


def run(mixture: Path, out: Path, workers: int = 1) -> dict:
    """Prepare quietly."""
    return prepare(mixture, out, workers, say=lambda line: None)


def texts(out: Path) -> list[str]:
    """Every prepared document as text."""
    tokenizer = ByteTokenizer()
    data = PreparedData(out, tokenizer, "test")
    return [tokenizer.decode(tokens.tolist()) for tokens in data.tokens(range(len(data)))]


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a prepared directory but the plan (it holds the times of the inputs)."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in ("plan.json", ".lock")
    }


def start(mixture: Path, out: Path, workers: int, **environment: str) -> subprocess.Popen:
    """`dreamer data prepare` in a process of its own."""
    words = [sys.executable, "-m", "dreamer_jax", "data", "prepare", str(mixture), "--out", str(out)]
    return subprocess.Popen(
        [*words, "--workers", str(workers)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
