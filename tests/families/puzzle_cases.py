"""Small puzzles and models of the family `depth_recurrent` that several tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from dreamer_jax.config.models.depth_recurrent import DepthRecurrentConfig
from dreamer_jax.families import build, initialise

GRAPH = DepthRecurrentConfig(
    depth=4, depth_min=2, max_depth=6, hidden_size=16, heads=2, mlp_size=20, vocab_size=5, dtype="float32"
)
FORMS: dict[str, dict[str, Any]] = {
    "graph": {},
    "text": {"positions": "rope", "layer_scale": 1e-4, "readout": "cls"},
    "post": {"norm": "post", "activation": "relu", "layer_scale": 0.1, "readout": "pair_linear", "classes": 3},
    "plain": {"gate": False, "depth_embedding_std": 0.0, "loss_at": "every"},
}
"""Each switch is on in one form and off in another."""


def form(name: str, **changes: Any) -> DepthRecurrentConfig:
    """The small model in one of the forms."""
    return dataclasses.replace(GRAPH, **{**FORMS[name], **changes})


def puzzles(config: Any, seed: int = 0, rows: int = 4, length: int = 7) -> dict[str, np.ndarray]:
    """[B, S]: the last row is nothing but padding, the others have padding behind them; graphs for models without
    positions."""
    rng = np.random.default_rng(seed)
    lengths = np.append(rng.integers(length - 3, length + 1, rows - 1), 0)
    real = np.arange(length) < lengths[:, None]
    read = np.zeros((rows, 1 if config.readout == "cls" else 2), np.int32)
    read[:, 1:] = lengths[:, None] // 2
    batch = {
        "tokens": rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "read": read,
        "targets": np.zeros((rows, length), np.int32),
        "loss_mask": real & (np.arange(length) == read[:, :1]),
    }
    batch["answer_mask"] = batch["loss_mask"].copy()
    batch["targets"][:, 0] = rng.integers(0, config.classes, rows)
    if config.positions == "none":
        batch["visible"] = (rng.random((rows, length, length)) < 0.4) | np.eye(length, dtype=bool)
    return batch


def drawn_params(config: Any, seed: int = 0) -> Any:
    """Parameters in which nothing is one or zero, LayerScale's factors included."""
    params, _ = initialise(build(config), jax.random.key(seed))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return structure.unflatten([x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


def changed(params: Any, path: str, values: Any) -> Any:
    """Parameters with one leaf (its path joined by dots) of one value, or of an array."""
    name, _, rest = path.partition(".")
    new = changed(params[name], rest, values) if rest else np.broadcast_to(values, params[name].shape)
    return {**params, name: np.asarray(new, np.float32) if not rest else new}
