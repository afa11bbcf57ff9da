"""From a checkpoint to a folder: folded, cast, streamed, and verified before it appears under its name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export import modeling_file, safetensors_files
from dreamer_jax.export.card import write_card
from dreamer_jax.export.description import MODEL_FILE, Description, describe, generation_settings, twin_of
from dreamer_jax.export.names import FOLDED, Name, names_of
from dreamer_jax.export.safetensors_files import Tensor
from dreamer_jax.export.tokenizer_files import write_tokenizer
from dreamer_jax.runs.leaves import Leaf, StoredModel


def export(
    model: StoredModel,
    out: Path,
    dtype: str,
    keep_shared: bool,
    verify: Callable[[Path], None],
    shard_bytes: int = safetensors_files.SHARD_BYTES,
) -> None:
    """Write a folder that PyTorch loads.

    The folder is written beside its place and moved there when `verify` has returned: it is complete or absent.

    Args:
        model: the checkpoint.
        out: the folder; nothing may exist there.
        dtype: "bfloat16" or "float32", of the matrices.
        keep_shared: keep shared experts apart instead of folding them (Eq. 8).
        verify: called with the written folder; raises when it is wrong.
        shard_bytes: largest safetensors file.

    Raises:
        UserError: the family has no PyTorch twin, `out` exists or can't be written, or the tokenizer isn't the one
            the run was trained with.
    """
    recurrent = twin_of(model.config).recurrent
    description = Description(model.config, {}, dtype, keep_shared and recurrent, model.step, model.meta)
    tokenizer = tokenizer_of(description)
    with written_aside(out) as folder:
        safetensors_files.write(folder, tensors_of(model, dtype, description.keep_shared), shard_bytes)
        _write_json(folder / "config.json", describe(description, tokenizer))
        _write_json(folder / "generation_config.json", generation_settings(tokenizer))
        write_tokenizer(folder, tokenizer, model.config.data.tokenizer, model.config.data.sequence_length)
        write_card(folder, description, tokenizer)
        (folder / MODEL_FILE).write_bytes(modeling_file())
        verify(folder)


def tokenizer_of(description: Description) -> Tokenizer:
    """The tokenizer of the run a folder is made from.

    Raises:
        UserError: it can't be loaded, or it isn't the one the run was trained with.
    """
    tokenizer = load_tokenizer(description.config.data.tokenizer)
    if tokenizer.fingerprint != description.meta.get("tokenizer"):
        raise UserError(
            f"data.tokenizer: {description.config.data.tokenizer} is not the tokenizer the run was trained with; "
            "bring the old file back"
        )
    return tokenizer


def tensors_of(model: StoredModel, dtype: str, keep_shared: bool) -> list[Tensor]:
    """Every tensor of the folder, to be read when it is written."""
    code = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    return [
        _tensor(model, name, "F32" if name.float32 else code, keep_shared)
        for name in names_of(twin_of(model.config), keep_shared)
    ]


@contextlib.contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` when the block ends well, and vanishes when it doesn't.

    Raises:
        UserError: something exists at `out`, or the folder can't be written.
    """
    _refuse_existing(out)
    aside = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        for path in (*aside.rglob("*"), aside):
            if path.is_dir():
                _sync(path)
        _refuse_existing(out)
        aside.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise UserError(f"{out}: can't write there: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists; name a path that doesn't, or remove it first")


def _tensor(model: StoredModel, name: Name, code: str, keep_shared: bool) -> Tensor:
    leaf = model.leaf(name.item, name.leaf)
    scope, _, last = name.leaf.rpartition(".")
    shared = None
    if last in FOLDED and twin_of(model.config).recurrent and not keep_shared:
        shared = model.leaf(name.item, f"{scope}.{FOLDED[last]}")
    shape = leaf.shape if name.layer is None else leaf.shape[1:]

    def read(start: int, stop: int) -> np.ndarray:
        rows = leaf[start:stop] if name.layer is None else leaf[name.layer, start:stop]
        return rows if shared is None else fold(rows, shared)

    return Tensor(name.tensor, code, shape, read)


def fold(routed: np.ndarray, shared: Leaf | np.ndarray) -> np.ndarray:
    """Eq. 8: the shared expert [a, b] added to every routed one [G, a, b], in float32."""
    return routed + np.asarray(shared[:], np.float32)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
