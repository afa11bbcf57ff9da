"""Names and layouts of the published state dict of MoEUT, and what its shapes say of the model.

Tensors of experts lie as ours do, [E, in, out]; matrices without experts are [out, in] there. Both rotate element i of
a head's first half with element i + d/4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dreamer_jax.config.models.moeut import MoeutConfig

EMBEDDING = "embedding.weight"
FIRST = "transformer.layers.0."
"""How the tensors of the first layer begin."""
NORMS = {"attention_norm": "ln1", "mlp_norm": "ln2"}
MATRICES = ("q", "k", "v", "o")
"""Last names of leaves that are transposed where they are matrices; with experts v and o aren't."""


def names_of(config: MoeutConfig) -> Iterator[tuple[str, str]]:
    """(leaf, tensor) of every leaf, in the order of the forward pass."""
    yield "embedding", EMBEDDING
    for g in range(config.layers):
        leaf, tensor = f"layers.{g}", f"transformer.layers.{g}"
        for ours, theirs in NORMS.items():
            yield f"{leaf}.{ours}.scale", f"{tensor}.{theirs}.weight"
            yield f"{leaf}.{ours}.bias", f"{tensor}.{theirs}.bias"
        for name in "qk":
            yield f"{leaf}.attention.{name}", f"{tensor}.attention.{name}.weight"
        for name in ("v", "o", *(["sel_v"] if config.attention_experts > 1 else []), "sel_o"):
            yield f"{leaf}.attention.{name}", f"{tensor}.attention.{name}"
        for name in ("keys", "values", "expert_sel"):
            yield f"{leaf}.feed_forward.{name}", f"{tensor}.ffn.{name}"
    yield "out_norm.scale", "out_norm.weight"
    yield "out_norm.bias", "out_norm.bias"
    yield "head", "lm_head.weight"
    yield "head_bias", "lm_head.bias"


def turned(leaf: str, values: np.ndarray) -> np.ndarray:
    """A leaf as its tensor, and the other way round."""
    return values.T if values.ndim == 2 and leaf.rpartition(".")[2] in MATRICES else values


def params_of(tensors: Mapping[str, np.ndarray], config: MoeutConfig) -> dict[str, Any]:
    """The parameters, float32, from all tensors of a state dict."""
    params: dict[str, Any] = {}
    for leaf, tensor in names_of(config):
        *scope, last = leaf.split(".")
        node = params
        for key in scope:
            node = node.setdefault(key, {})
        node[last] = np.asarray(turned(leaf, tensors[tensor]), np.float32)
    return params


def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The settings that shapes decide; none where they are not of this form."""
    try:
        vocabulary, hidden = shapes[EMBEDDING]
        width, _ = shapes[f"{FIRST}attention.q.weight"]
        experts, _, size = shapes[f"{FIRST}ffn.keys"]
        selectors, _ = shapes[f"{FIRST}attention.sel_o"]
        values = shapes[f"{FIRST}attention.v"]
        # Of several experts V is [n E, h, d]; of one it is a matrix, and there is a selector for each head.
        heads = width // values[2] if len(values) == 3 else selectors
        return {
            "layers": 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("transformer.layers.")),
            "hidden_size": hidden,
            "vocab_size": vocabulary,
            "heads": heads,
            "head_size": width // heads,
            "attention_experts": selectors // heads,
            "num_experts": experts,
            "expert_size": size,
        }
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        return {}
