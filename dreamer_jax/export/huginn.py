"""Folders of Huginn's own format (`model_type: huginn_raven`): names and layouts of tensors, in both directions.

Published are the 3.5B model, retrofitted Llamas in the same names, and what was fine-tuned from either. Matrices lie
there as [out, in]. Where the published code rotates neighbouring elements of a head, this package rotates element i
with element i + d/2: the same rotation after one permutation of the columns that make queries and keys, which scores
don't see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from dreamer_jax.config.models.huginn import HuginnConfig

MODEL_TYPE = "huginn_raven"

SANDWICH = {"norm_1": "attention_norm", "norm_2": "attention_out_norm", "norm_3": "mlp_norm", "norm_4": "mlp_out_norm"}
PRE_NORM = {"norm_1": "attention_norm", "norm_2": "mlp_norm"}

Kind = Literal["same", "matrix", "qkv", "bias", "half"]


class Name(NamedTuple):
    """Where the values of one leaf are in a folder.

    Attributes:
        tensor: name in the file.
        leaf: path in the parameters, joined by dots.
        kind: same: as they are. matrix: transposed. qkv: transposed, queries and keys in another order. bias: one row
            of a tensor [2, 1, n, d] that holds the queries' and the keys'. half: the first or second half of the rows.
        row: of a bias or half.
    """

    tensor: str
    leaf: str
    kind: Kind
    row: int = 0


def names_of(config: HuginnConfig) -> Iterator[Name]:
    """Every leaf, in the order of the forward pass; an output head only where it isn't the embedding."""
    yield Name("transformer.wte.weight", "embedding", "same")
    for part, stack, count in (
        ("prelude", "prelude", config.prelude_layers),
        ("core", "core_block", config.core_layers),
        ("coda", "coda", config.coda_layers),
    ):
        if part == "core":
            yield Name("transformer.adapter.weight", "adapter", "matrix")
        for i in range(count):
            yield from _layer(config, f"transformer.{stack}.{i}", f"{part}.{i}")
    yield Name("transformer.ln_f.weight", "final_norm", "same")
    if not config.tied_head:
        yield Name("lm_head.weight", "head", "same")


def _layer(config: HuginnConfig, tensor: str, leaf: str) -> Iterator[Name]:
    for theirs, ours in (SANDWICH if config.form == "sandwich" else PRE_NORM).items():
        yield Name(f"{tensor}.{theirs}.weight", f"{leaf}.{ours}.scale", "same")
    yield Name(f"{tensor}.attn.Wqkv.weight", f"{leaf}.attention.qkv", "qkv")
    if config.queries == "bias":
        yield Name(f"{tensor}.attn.qk_bias", f"{leaf}.attention.q_bias", "bias", 0)
        yield Name(f"{tensor}.attn.qk_bias", f"{leaf}.attention.k_bias", "bias", 1)
    yield Name(f"{tensor}.attn.proj.weight", f"{leaf}.attention.out", "matrix")
    yield Name(f"{tensor}.mlp.fc.weight", f"{leaf}.feed_forward.gate", "half", 0)
    yield Name(f"{tensor}.mlp.fc.weight", f"{leaf}.feed_forward.up", "half", 1)
    yield Name(f"{tensor}.mlp.proj.weight", f"{leaf}.feed_forward.out", "matrix")


def interleaved(config: HuginnConfig) -> bool:
    """Whether the published code rotates neighbours; that of retrofitted models rotates halves as we do."""
    return config.form == "sandwich"


def to_leaf(name: Name, tensor: np.ndarray, config: HuginnConfig) -> np.ndarray:
    """A leaf from its tensor, in the tensor's dtype."""
    if name.kind == "matrix":
        return tensor.T
    if name.kind == "qkv":
        return tensor[_order(config)].T
    if name.kind == "bias":
        return tensor[name.row].reshape(-1)[_order(config)[: config.heads * config.head_size]]
    if name.kind == "half":
        return np.split(tensor, 2)[name.row]
    return tensor


def to_tensor(name: Name, leaf: np.ndarray, config: HuginnConfig) -> np.ndarray:
    """The inverse of `to_leaf`; of a bias its row [1, 1, n, d], of a half that half."""
    if name.kind == "matrix":
        return leaf.T
    if name.kind == "qkv":
        return leaf.T[np.argsort(_order(config))]
    if name.kind == "bias":
        back = np.argsort(_order(config)[: config.heads * config.head_size])
        return leaf[back].reshape(1, 1, config.heads, config.head_size)
    return leaf


def _order(config: HuginnConfig) -> np.ndarray:
    """Rows of Wqkv in our order."""
    rotated, size = config.heads + config.kv_heads, config.head_size
    rows = np.arange((rotated + config.kv_heads) * size)
    if not interleaved(config):
        return rows
    of_heads = rows[: rotated * size].reshape(rotated, size // 2, 2).swapaxes(1, 2).reshape(-1)
    return np.concatenate([of_heads, rows[rotated * size :]])


def shape_of(name: Name, leaf: tuple[int, ...], config: HuginnConfig) -> tuple[int, ...]:
    """The shape of a tensor from that of its leaf."""
    if name.kind in ("matrix", "qkv"):
        return leaf[::-1]
    if name.kind == "half":
        return (2 * leaf[0], *leaf[1:])
    return (2, 1, config.heads, config.head_size) if name.kind == "bias" else leaf


def params_of(tensors: dict[str, np.ndarray], config: HuginnConfig) -> dict[str, Any]:
    """The parameters, float32, from all tensors of a folder."""
    params: dict[str, Any] = {}
    for name in names_of(config):
        *scope, last = name.leaf.split(".")
        node = params
        for key in scope:
            node = node.setdefault(key, {})
        node[last] = np.asarray(to_leaf(name, tensors[name.tensor], config), np.float32)
    return params
