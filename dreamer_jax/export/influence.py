"""How much every layer of a pretrained stack changes its input: block influence (ShortGPT, Men et al., 2024, Eq. 1).

    BI_l = 1 - E[cos(x_l, x_{l+1})]      over the tokens of a text; x_l enters layer l, x_{l+1} leaves it

A layer of little influence is missed least.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.memory import Context, Fresh
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.config.models.recursive import RecursiveConfig
from dreamer_jax.data.tokenizers import load_tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export.form import without_run
from dreamer_jax.export.sources import EMBEDDING, Source
from dreamer_jax.families import build, depth_of

SMALLEST = 1e-30
TOKENS, ROW = 8192, 512
"""Tokens of the text that are read at most, and in rows of how many at most."""


def rows_of(source: Source, path: Path) -> np.ndarray:
    """[B, S] int32: the beginning of a text in whole rows, by the source's own tokenizer.

    Raises:
        UserError: the file can't be read or is empty, or the tokenizer isn't the model's.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"--text: can't read {path}: {error.strerror}") from None
    settings, _ = without_run(source.folder, source.length, source.dtype, source.vocab_size)
    ids = load_tokenizer(settings["data.tokenizer"]).encode(text[: 16 * TOKENS])[:TOKENS]
    if not ids:
        raise UserError(f"--text: {path} is empty; influence is measured on a text")
    if max(ids) >= source.vocab_size:
        where = (
            "its tokenizer.json" if settings["data.tokenizer"] != "bytes" else "bytes, for want of a tokenizer.json,"
        )
        raise UserError(
            f"{source.folder}: {where} gives token {max(ids)}, but the vocabulary has {source.vocab_size} rows"
        )
    size = min(source.length, ROW, len(ids))
    return np.asarray(ids[: len(ids) // size * size], np.int32).reshape(-1, size)


def block_influence(source: Source, rows: np.ndarray) -> np.ndarray:
    """[layers]: of every layer, on the tokens [B, S], in float32; one layer is in memory at a time."""
    config = RecursiveConfig(depth=1, layers=1, dtype="float32", **source.settings())
    layer = build(config, REFERENCE).layer  # type: ignore[attr-defined]
    positions = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    context = Context(jnp.ones_like(positions), positions)

    @jax.jit
    def apply(weights, x):
        def row(x):  # [S, h]
            out, _ = layer.apply({"params": weights}, x[None], depth_of(0, 1), Fresh(), context)
            return out[0]

        out = jax.lax.map(row, x)
        sizes = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(out, axis=-1)
        return out, 1 - jnp.mean(jnp.sum(x * out, axis=-1) / jnp.maximum(sizes, SMALLEST))

    x = jnp.asarray(np.asarray(source.tensors[EMBEDDING].array()[rows], np.float32))
    found = []
    for l in range(source.layers):
        x, influence = apply(source.layer(l), x)
        found.append(float(influence))
    return np.asarray(found)
