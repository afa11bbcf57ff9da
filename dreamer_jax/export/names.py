"""Dreamer: which JAX parameter is which PyTorch tensor; one table, read in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dreamer_jax.blocks.parameters import FLOAT32
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.families import KNOWLEDGE, build
from dreamer_jax.runs.leaves import Leaf

GLOBAL = (
    ("embedding", "model.embedding.weight"),
    ("head", "model.head.weight"),
)
DECODING = (
    ("decoding.norm.scale", "model.decoding.norm.weight"),
    ("decoding.feed_forward.gate", "model.decoding.gate"),
    ("decoding.feed_forward.up", "model.decoding.up"),
    ("decoding.feed_forward.out", "model.decoding.out"),
)
TEXTS = (("texts", "model.knowledge"),)
FINAL_NORM = (("final_norm.scale", "model.final_norm.weight"),)

NORMS = (
    ("sequence_norm.scale", "sequence_norm.weight"),
    ("depth_norm.scale", "depth_norm.weight"),
    ("expert_norm.scale", "expert_norm.weight"),
    ("parameter_norm.scale", "parameter_norm.weight"),
    ("dimension_norm.scale", "dimension_norm.weight"),
    ("residual_norm.scale", "residual_norm.weight"),
)
DEPTH_STATES = {
    "gated_delta": (("gates", "gates"), ("fall", "fall"), ("rate", "rate")),
    "gated_recurrent": (("gates", "gates"), ("offset", "offset")),
}
ATTENTION = (
    ("q_norm.scale", "q_norm.weight"),
    ("k_norm.scale", "k_norm.weight"),
    ("projections.qkv", "projections.qkv"),
    ("projections.out", "projections.out"),
)
SHARED = (
    ("projections.qkv_shared", "projections.qkv_shared"),
    ("projections.out_shared", "projections.out_shared"),
)
INJECTION = (
    ("norm.scale", "norm.weight"),
    ("fall", "fall"),
    ("rate", "rate"),
    ("matrix", "matrix"),
)
PARAMETERS = (
    ("query", "query"),
    ("keys", "keys"),
    ("values", "values"),
    ("output", "output"),
    ("q_norm.scale", "q_norm.weight"),
    ("k_norm.scale", "k_norm.weight"),
)
EXPERTS = (
    ("gate_up", "gate_up"),
    ("down", "down"),
)
ROUTER = (
    ("router.query", "router.query"),
    ("router.keys", "router.keys"),
    ("router.query_norm.scale", "router.query_norm.weight"),
    ("router.keys_norm.scale", "router.keys_norm.weight"),
)
SIGNALS = (("depth_signals", "depth_signals"),)
BIAS = "router.bias"

FOLDED = {"qkv": "qkv_shared", "out": "out_shared"}
"""Routed experts -> the shared expert that Eq. 8 adds to each of them."""


def fold(routed: np.ndarray, shared: Leaf | np.ndarray) -> np.ndarray:
    """Eq. 8: the shared expert [a, b] added to every routed one [G, a, b], in float32."""
    return routed + np.asarray(shared[:], np.float32)


class Name(NamedTuple):
    """One tensor of the folder and where its values are in the train state.

    Attributes:
        tensor: name in model.safetensors.
        item: "params", "balancing" or "knowledge".
        leaf: path of the leaf in that item, joined by dots.
        layer: index along the leaf's leading axis, or None: the whole leaf.
        part: what a person calls it: embedding, texts, SA, DA, EA, residual or head, with the layer in LA.
        float32: whether it stays float32 in a bfloat16 folder: what the JAX model never casts either, by its role.
    """

    tensor: str
    item: str
    leaf: str
    layer: int | None
    part: str
    float32: bool

    @property
    def shared(self) -> str | None:
        """The leaf that Eq. 8 adds to each of its matrices, where they are linear experts and have one beside them."""
        scope, _, last = self.leaf.rpartition(".")
        return f"{scope}.{FOLDED[last]}" if scope.endswith(".projections") and last in FOLDED else None


def names_of(config: DreamerConfig, keep_shared: bool) -> Iterator[Name]:
    """Every tensor of a folder, in the order of the forward pass.

    Args:
        config: the model.
        keep_shared: whether shared experts are tensors of their own instead of folded into the routed ones.
    """
    roles = build(config).roles
    for tensor, item, leaf, layer, part in _entries(config, keep_shared):
        role = roles
        for key in leaf.split(".") if item == "params" else ():
            role = role[key]
        yield Name(tensor, item, leaf, layer, part, item != "params" or role in FLOAT32)


Entry = tuple[str, str, str, int | None, str]
"""The first fields of a Name."""


def _entries(config: DreamerConfig, keep_shared: bool) -> Iterator[Entry]:
    for leaf, tensor in GLOBAL[:1]:
        yield tensor, "params", leaf, None, "embedding"
    for leaf, tensor in TEXTS if config.pa_embedding_size else ():
        yield tensor, KNOWLEDGE, leaf, None, "texts"
    for index in range(1 if config.recurrent else config.depth):
        yield from _layer(config, keep_shared, index)
    for leaf, tensor in DECODING if config.decoding_size else ():
        yield tensor, "params", leaf, None, "decoding layer"
    for leaf, tensor in FINAL_NORM if config.final_norm else ():
        yield tensor, "params", leaf, None, "final norm"
    for leaf, tensor in GLOBAL[1:]:
        yield tensor, "params", leaf, None, "head"


def _layer(config: DreamerConfig, keep_shared: bool, index: int) -> Iterator[Entry]:
    scope, layer = ("layer", None) if config.recurrent else ("layers", index)
    where = "" if config.recurrent else f" of layer {index}"

    def name(leaf: str, tensor: str, part: str) -> Entry:
        return f"model.layers.{index}.{tensor}", "params", f"{scope}.{leaf}", layer, part + where

    def bias(router: str, prefix: str, part: str) -> Entry:
        return f"model.layers.{index}.{prefix}{BIAS}", "balancing", router, layer, part + where

    told = config.depth_counters == "learned" and config.router_depth_code
    router = (*ROUTER, *((f"router.{leaf}", f"router.{tensor}") for leaf, tensor in SIGNALS if told))
    parts = {"sequence": "SA", "depth": "DA", "expert": "EA", "parameter": "PA", "residual": "residual norm"}
    parts["dimension"] = "choice of dimensions"
    absent = {
        "dimension": not config.dimensions_per_token,
        "parameter": not config.pa_slots,
        "depth": not config.depth_attention,
        "residual": not config.normalised_stream,
    }
    for leaf, tensor in NORMS:
        kind = leaf.partition("_")[0]
        if not absent.get(kind):
            yield name(leaf, tensor, parts[kind])
    of_parameters = (*PARAMETERS, *(SIGNALS if config.depth_counters == "learned" else ()))
    for leaf, tensor in of_parameters if config.pa_slots else ():
        yield name(f"parameter_attention.{leaf}", f"parameter_attention.{tensor}", "PA")
    for leaf, tensor in INJECTION if config.injection != "none" else ():
        yield name(f"injection.{leaf}", f"injection.{tensor}", "injection")
    for kind in ("depth", "sequence"):
        attention, prefix = f"{kind}_attention", "projections."
        if absent.get(kind):
            continue
        of_kind = ATTENTION
        if kind == "depth" and config.da_form != "softmax":
            of_kind = (*ATTENTION[2:], *DEPTH_STATES[config.da_form])
        learned = SIGNALS if kind == "depth" and config.depth_counters == "learned" else ()
        learned = () if config.da_form == "gated_recurrent" else learned
        moe = [(f"{prefix}{leaf}", f"{prefix}{tensor}") for leaf, tensor in router] if config.attention_moes else []
        for leaf, tensor in (*of_kind, *learned, *(SHARED if config.shared_experts and keep_shared else ()), *moe):
            yield name(f"{attention}.{leaf}", f"{attention}.{tensor}", parts[kind])
        if moe:
            yield bias(attention, f"{attention}.{prefix}", parts[kind])
    if config.dimensions_per_token:
        for leaf, tensor in router:
            yield name(f"dimensions.{leaf}", f"dimensions.{tensor}", parts["dimension"])
        yield bias("dimensions", "dimensions.", parts["dimension"])
    for leaf, tensor in (*EXPERTS, *router):
        yield name(f"expert_attention.{leaf}", f"expert_attention.{tensor}", "EA")
    yield bias("expert_attention", "expert_attention.", "EA")
