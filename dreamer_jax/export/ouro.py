"""Folders of Ouro's own format (`model_type: ouro`): names and layouts of tensors, in both directions.

Matrices lie there as [out, in], those of queries, keys and values apart. Both rotate element i of a head with element
i + d/2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from dreamer_jax.config.models.ouro import OuroConfig

MODEL_TYPE = "ouro"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

NORMS = {
    "input_layernorm": "attention_norm",
    "input_layernorm_2": "attention_out_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_layernorm_2": "mlp_out_norm",
}

Kind = Literal["same", "matrix", "row"]


class Name(NamedTuple):
    """Which tensors of a folder hold the values of one leaf.

    Attributes:
        leaf: path in the parameters, joined by dots.
        tensors: names in the file; of several, each is a range of the leaf's columns.
        kind: same: as they are. matrix: transposed. row: the one row of a matrix.
    """

    leaf: str
    tensors: tuple[str, ...]
    kind: Kind


def names_of(config: OuroConfig) -> Iterator[Name]:
    """Every leaf, in the order of the forward pass."""
    yield Name("embedding", (EMBEDDING,), "same")
    for i in range(config.layers):
        tensor, leaf = f"model.layers.{i}", f"layers.{i}"
        for theirs, ours in NORMS.items():
            yield Name(f"{leaf}.{ours}.scale", (f"{tensor}.{theirs}.weight",), "same")
        qkv = tuple(f"{tensor}.self_attn.{part}_proj.weight" for part in "qkv")
        yield Name(f"{leaf}.attention.qkv", qkv, "matrix")
        yield Name(f"{leaf}.attention.out", (f"{tensor}.self_attn.o_proj.weight",), "matrix")
        yield Name(f"{leaf}.feed_forward.gate", (f"{tensor}.mlp.gate_proj.weight",), "same")
        yield Name(f"{leaf}.feed_forward.up", (f"{tensor}.mlp.up_proj.weight",), "same")
        yield Name(f"{leaf}.feed_forward.out", (f"{tensor}.mlp.down_proj.weight",), "matrix")
    yield Name("final_norm", ("model.norm.weight",), "same")
    yield Name("exit_gate.weight", ("model.early_exit_gate.weight",), "row")
    yield Name("exit_gate.bias", ("model.early_exit_gate.bias",), "same")
    yield Name("head", (HEAD,), "same")


def to_leaf(name: Name, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """A leaf from its tensors, in their dtype."""
    found = [tensors[each] for each in name.tensors]
    if name.kind == "matrix":
        return np.concatenate(found).T
    return found[0][0] if name.kind == "row" else found[0]


def columns_of(name: Name, config: OuroConfig) -> list[tuple[int, int]]:
    """Of a matrix's tensors, the ranges of the leaf's columns that they hold."""
    if len(name.tensors) == 1:
        return [(0, config.hidden_size)]
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    return [(0, queries), (queries, queries + keys), (queries + keys, queries + 2 * keys)]


def params_of(tensors: Mapping[str, np.ndarray], config: OuroConfig) -> dict[str, Any]:
    """The parameters, float32, from all tensors of a folder."""
    params: dict[str, Any] = {}
    for name in names_of(config):
        *scope, last = name.leaf.split(".")
        node = params
        for key in scope:
            node = node.setdefault(key, {})
        node[last] = np.asarray(to_leaf(name, tensors), np.float32)
    return params
