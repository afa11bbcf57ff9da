"""From a checkpoint to a folder: folded, cast, streamed, and verified before it appears under its name."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export import modeling_file
from dreamer_jax.export.card import write_card
from dreamer_jax.export.description import Description, form_of, generation_settings
from dreamer_jax.export.tokenizer_files import write_tokenizer
from dreamer_jax.inference.model import check_generates
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import StoredModel


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
        UserError: the family's folders have no place for the model, it was trained with copies of tokens, `out` exists
            or can't be written, the tokenizer isn't the one the run was trained with, or the checkpoint is removed
            meanwhile.
    """
    check_generates(model.config)
    form = form_of(model.config)
    keeps = keep_shared and form.has_shared(model.config.model)
    description = Description(model.config, {}, dtype, keeps, model.step, model.meta)
    tokenizer = tokenizer_of(description) if form.texts else None
    settings = form.settings(description, tokenizer)
    with written_aside(out) as folder, model.reading():
        tensors = [*form.tensors(model, description), *form.derived(model, description)]
        safetensors_files.write(folder, tensors, shard_bytes)
        _write_json(folder / "config.json", settings)
        if tokenizer is not None:
            _write_json(folder / "generation_config.json", generation_settings(tokenizer))
            write_tokenizer(folder, tokenizer, model.config.data.tokenizer, model.config.data.sequence_length)
        write_card(folder, description, tokenizer, model.steps)
        (folder / form.model_file).write_bytes(modeling_file(form.model_file))
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


@contextlib.contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` when the block ends well, and vanishes when it doesn't. What
    killed processes of this machine left there is removed first.

    Raises:
        UserError: something exists at `out`, or the folder can't be written.
    """
    refuse_existing(out)
    begins = f".{out.name}.partial-{socket.gethostname()}-"
    aside = out.parent / f"{begins}{os.getpid()}"
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{out}: can't write there: {out.parent}, or what it is in, is a file") from None
        for left in out.parent.glob(f"{glob.escape(begins)}*"):
            if left == aside or not _lives(left.name.removeprefix(begins)):
                shutil.rmtree(left)
        aside.mkdir()
        yield aside
        for path in (*aside.rglob("*"), aside):
            if path.is_dir():
                _sync(path)
        refuse_existing(out)
        aside.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise UserError(f"{out}: can't write there: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _lives(number: str) -> bool:
    """Whether a process of that number does; of what is none, too."""
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        pass
    return True


def refuse_existing(out: Path) -> None:
    """Nothing may exist where a folder goes.

    Raises:
        UserError: something does.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists; name a path that doesn't, or remove it first")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
