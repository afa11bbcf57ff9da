"""Files of embeddings of texts, which parameter attention reads: FILE.safetensors with one tensor, `texts` [N, e], and
FILE.jsonl beside it with the texts themselves, a record with a field `text` for each row.

Whoever made the embeddings, their rows are read with a mean square of 1, float32: so a model takes other files than the
one that it was trained with, if their embeddings are of the same size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dreamer_jax.config.values import ModelConfig, knowledge_of
from dreamer_jax.errors import UserError
from dreamer_jax.runs.folders import write_atomically
from dreamer_jax.runs.safetensors_files import Tensor, open_file, write_file

NAME = "texts"
SUFFIX = ".safetensors"


def read_embeddings(path: str | Path, model: ModelConfig, number: bool = True) -> np.ndarray:
    """The embeddings [N, e] of a file, each of mean square 1, float32.

    Args:
        path: of the safetensors file.
        model: which they are for; e has to be what it takes.
        number: whether N has to be so, too.

    Raises:
        UserError: no such file, another shape, a number that isn't finite, or an embedding of zeros.
    """
    wanted = knowledge_of(model)
    if wanted is None:
        raise UserError(f"{path}: this model attends to no texts; train one with model.pa_source texts")
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `dreamer embed` makes one of texts")
    stored = open_file(path).get(NAME)
    if stored is None or len(stored.shape) != 2:
        raise UserError(f"{path} holds no tensor {NAME} [N, e]; `dreamer embed` makes such a file of texts")
    count, size = stored.shape
    if size != wanted[1]:
        raise UserError(f"{path} holds embeddings of {size} numbers; model.pa_embedding_size is {wanted[1]}")
    if number and count != wanted[0]:
        raise UserError(f"{path} holds {count} texts; model.pa_slots is {wanted[0]}")
    if not count:
        raise UserError(f"{path} holds no texts")
    found = np.array(stored.array(), np.float32)
    for row in np.flatnonzero(~np.isfinite(found).all(axis=1))[:1]:
        raise UserError(f"{path}: the embedding of text {row + 1} has a number that isn't finite")
    size_of = np.sqrt(np.mean(found.astype(np.float64) ** 2, axis=1, keepdims=True))
    for row in np.flatnonzero(size_of[:, 0] == 0)[:1]:
        raise UserError(f"{path}: the embedding of text {row + 1} is zero")
    return (found / size_of).astype(np.float32)


def texts_beside(path: str | Path) -> Path:
    """Where the texts of a file of embeddings are."""
    return Path(path).with_suffix(".jsonl")


def read_texts(path: str | Path, count: int) -> list[str] | None:
    """The texts of a file of embeddings of so many; None where they aren't beside it."""
    beside = texts_beside(path)
    if not beside.is_file():
        return None
    try:
        texts = [str(json.loads(line)["text"]) for line in beside.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return texts if len(texts) == count else None


def write(path: Path, embeddings: np.ndarray, texts: Sequence[str]) -> None:
    """Both files, or none.

    Args:
        path: of the safetensors file.
        embeddings: [N, e] float32.
        texts: N.

    Raises:
        OSError: they can't be written.
    """
    unfinished, beside = path.with_name(f".{path.name}.{os.getpid()}"), texts_beside(path)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    try:
        write_file(unfinished, [Tensor(NAME, "F32", embeddings.shape, lambda start, stop: embeddings[start:stop])])
        write_atomically(beside, "".join(lines))
        unfinished.replace(path)
    except BaseException:
        for half in (unfinished, beside):
            with contextlib.suppress(OSError):
                half.unlink()
        raise


def label(path: str | Path, embeddings: np.ndarray) -> str:
    """A name for the content of a file, for records of what a model did with it."""
    return f"{Path(path).stem}-{hashlib.sha256(embeddings.tobytes()).hexdigest()[:8]}"
