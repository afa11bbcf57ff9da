"""What tests take from elsewhere: outputs of official code, the papers' tables, records of public data sets.

`tests/golden` and `tests/samples` have them, each with a README that says where they come from and under which licence.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parent
SAMPLES = TESTS / "samples"
LLAMA3 = TESTS.parents[1] / "shared" / "data" / "llama3_tokenizer" / "tokenizer.model"
"""The rank file of Llama 3, only for tests of the marker `llama3`: it isn't under an open licence, so it isn't here."""


def official_outputs(name: str) -> tuple[Any, Any]:
    """Arrays of the official code on a tiny model, by name, and what else it said (None where it said nothing)."""
    path = TESTS / "golden" / f"{name}.npz"
    said = path.with_suffix(".json")
    return np.load(path), json.loads(said.read_text()) if said.is_file() else None


def paper_tables() -> dict[str, Any]:
    """Numbers of the papers, typed off."""
    return json.loads((SAMPLES / "paper_tables.json").read_text())


def sample(name: str) -> list[dict[str, Any]]:
    """Records of a sample, such as "gsm8k/train"."""
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_rank_file(folder: Path, size: int = 1000) -> Path:
    """A tiktoken rank file in Llama 3's form, whose merges the project's own training found in the questions of GSM8K.

    Args:
        folder: gets `tokenizer.model`, and the tokenizer.json that was trained.
        size: entries of that one: 256 bytes, three special tokens, and merges.
    """
    from dreamer_jax.data.json_tokenizer import train_tokenizer
    from dreamer_jax.data.mixture import load_mixture

    mixture = folder / "mixture.yaml"
    mixture.write_text(f"sources: {{gsm8k: {{path: {SAMPLES}/gsm8k/train.jsonl}}}}\n")
    train_tokenizer(load_mixture(mixture), size, folder / "trained.json")
    content = json.loads((folder / "trained.json").read_text())
    special = {token["content"] for token in content["added_tokens"]}
    vocabulary = sorted((number, token) for token, number in content["model"]["vocab"].items() if token not in special)
    lines = [base64.b64encode(bytes_of(token)) + b" %d\n" % rank for rank, (_, token) in enumerate(vocabulary)]
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(lines))
    return path


def bytes_of(token: str) -> bytes:
    """The bytes that a byte-level BPE spells by characters that can be seen (GPT-2's table)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in seen]
    table = {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[character] for character in token)
