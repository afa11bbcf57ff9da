"""Pretrained stacks that others publish, as conversions read them: Llama, Qwen3 and OLMo 2.

A folder has config.json, safetensors and perhaps tokenizer.json. Tensors are found by name; no code of a folder is
executed. Matrices lie there as [out, in], and rotations turn element i of a head with element i + d/2, as here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.export.form import dtype_of
from dreamer_jax.export.json_values import flag, number, refuse_other_layers, rotation, whole
from dreamer_jax.runs.safetensors_files import Stored, open_tensors, read_json

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DERIVED = "rotary_emb.inv_freq"
"""How the name of a tensor ends that early folders store and that says nothing new."""
ROW_LENGTH = 4096
"""Longest rows of a run that goes on with a source, unless its data say something else."""


class Kind(NamedTuple):
    """What tells the layers of one `model_type` from those of another.

    Attributes:
        name: for people.
        form, queries: see `blocks/layer.py` and `blocks/self_attention.py`.
        norms: leaf of a layer -> the tensor's name in its layer.
        epsilon, rope_base: what a missing key means.
        head_size: likewise; None: what the heads leave of the hidden size.
    """

    name: str
    form: Literal["pre_norm", "branch_norm"]
    queries: Literal["plain", "head_norm", "norm"]
    norms: dict[str, str]
    epsilon: float = 1e-6
    rope_base: float = 10_000.0
    head_size: int | None = None


_BEFORE = {"attention_norm.scale": "input_layernorm", "mlp_norm.scale": "post_attention_layernorm"}
_BEHIND = {"attention_out_norm.scale": "post_attention_layernorm", "mlp_out_norm.scale": "post_feedforward_layernorm"}
_QUERIES = {"attention.q_norm.scale": "self_attn.q_norm", "attention.k_norm.scale": "self_attn.k_norm"}
KINDS = {
    "llama": Kind("Llama", "pre_norm", "plain", _BEFORE),
    "qwen3": Kind("Qwen3", "pre_norm", "head_norm", _BEFORE | _QUERIES, head_size=128),
    "olmo2": Kind("OLMo 2", "branch_norm", "norm", _BEHIND | _QUERIES, epsilon=1e-5),
}
"""`model_type` -> what its layers are."""
MATRICES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "feed_forward.gate": ("mlp.gate_proj",),
    "feed_forward.up": ("mlp.up_proj",),
    "feed_forward.out": ("mlp.down_proj",),
}
"""Leaf of a layer -> the tensors whose rows are its columns."""
ROWS = ("feed_forward.gate", "feed_forward.up")
"""Of those, the leaves whose rows are the tensor's rows."""
BUILT: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
"""Keys of what could be computed, and the one value that is, which is the default."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A pretrained stack of layers.

    Attributes:
        folder: where it was read.
        kind: what its layers are.
        layers, hidden_size, vocab_size, heads, kv_heads, head_size, mlp_size: sizes, as the families name them.
        rope_base, norm_epsilon: likewise.
        rope_scaling: the settings of scaled rotations; empty for unscaled ones.
        tied_head: whether the head is the embedding.
        length: tokens of its longest context, at most `ROW_LENGTH`.
        dtype: "bfloat16" or "float32", of its matrices.
        tensors: in its files, by name.
    """

    folder: Path
    kind: Kind
    layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    rope_base: float
    rope_scaling: Mapping[str, float]
    norm_epsilon: float
    tied_head: bool
    length: int
    dtype: str
    tensors: Mapping[str, Stored]

    def settings(self) -> dict[str, Any]:
        """What a model of its layers says in the section `model`, whatever its family."""
        names = ("hidden_size", "vocab_size", "heads", "kv_heads", "head_size", "mlp_size", "rope_base")
        names += ("norm_epsilon", "tied_head")
        its = {name: getattr(self, name) for name in names} | dict(self.rope_scaling)
        return {"form": self.kind.form, "queries": self.kind.queries, **its}

    def layer(self, number: int) -> dict[str, Any]:
        """Parameters of a layer in the tree of `blocks/layer.py`, float32."""
        tree: dict[str, Any] = {}
        for leaf, tensors in _layer_tensors(self.kind, number).items():
            *scope, last = leaf.split(".")
            node = tree
            for key in scope:
                node = node.setdefault(key, {})
            found = np.concatenate([self._values(name) for name in tensors])
            node[last] = found if found.ndim == 1 or leaf in ROWS else np.ascontiguousarray(found.T)
        return tree

    def around(self) -> dict[str, Any]:
        """`embedding`, `final_norm` and, unless it is tied, `head`, float32."""
        names = {"embedding": EMBEDDING, "final_norm": FINAL_NORM} | ({} if self.tied_head else {"head": HEAD})
        return {leaf: self._values(name) for leaf, name in names.items()}

    def _values(self, name: str) -> np.ndarray:
        """A tensor, float32.

        Raises:
            UserError: a number isn't finite.
        """
        values = np.asarray(self.tensors[name].array(), np.float32)
        if not np.isfinite(values).all():
            raise UserError(f"{self.folder}: {name} holds numbers that aren't finite; take a whole copy of the folder")
        return values


def read_source(folder: Path) -> Source:
    """The pretrained stack in a folder.

    Raises:
        UserError: it is of another type, incomplete or damaged, or can't be computed here.
    """
    path = folder / "config.json"
    if not path.exists():
        known = ", ".join(kind.name for kind in KINDS.values())
        raise UserError(f"{path} does not exist; name a folder of config.json and safetensors, of {known}")
    content = read_json(path)
    named = content.get("model_type")
    kind = KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        known = ", ".join(KINDS)
        raise UserError(f"{path} describes a model of type {content.get('model_type')!r}; conversions read {known}")
    for key, value in BUILT.items():
        if content.get(key, value) not in (value, None):
            raise UserError(f"{path}: {key} is {content[key]!r}; only {value!r} can be computed")
    refuse_other_layers(path, content)
    tensors = {name: its for name, its in open_tensors(folder).items() if not name.endswith(DERIVED)}
    rope = content.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(its, dict) for its in rope.values()):
        raise UserError(f"{path}: rope_parameters is {rope!r}; only one rotation of all layers can be computed")
    heads = whole(path, content, "num_attention_heads")
    hidden = whole(path, content, "hidden_size")
    size = kind.head_size or hidden // max(heads, 1)
    source = Source(
        folder,
        kind,
        whole(path, content, "num_hidden_layers"),
        hidden,
        whole(path, content, "vocab_size"),
        heads,
        whole(path, content, "num_key_value_heads", heads),
        whole(path, content, "head_dim", size),
        whole(path, content, "intermediate_size"),
        *rotation(path, content if "rope_theta" in {*content, *rope} else {**content, "rope_theta": kind.rope_base}),
        number(path, content, "rms_norm_eps", kind.epsilon),
        flag(path, content, "tie_word_embeddings", False),
        min(whole(path, content, "max_position_embeddings", ROW_LENGTH), ROW_LENGTH),
        dtype_of(folder, tensors, EMBEDDING),
        tensors,
    )
    _check_tensors(source)
    return source


def _layer_tensors(kind: Kind, number: int) -> dict[str, tuple[str, ...]]:
    """Leaf of a layer -> names of the tensors that hold it."""
    theirs = {leaf: (name,) for leaf, name in kind.norms.items()} | MATRICES
    return {leaf: tuple(f"model.layers.{number}.{name}.weight" for name in names) for leaf, names in theirs.items()}


def _check_tensors(source: Source) -> None:
    """Refuse a folder whose tensors aren't exactly those that its config.json asks for."""
    shapes = _shapes(source)
    folder, tensors = source.folder, source.tensors
    if source.tied_head and HEAD in tensors:  # stored all the same
        shapes[HEAD] = shapes[EMBEDDING]
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{folder}: the tensor {name} is missing")
        if tensors[name].shape != shape:
            raise UserError(f"{folder}: {name} has shape {tensors[name].shape} where config.json asks for {shape}")
    others = sorted(set(tensors) - set(shapes))
    if others:
        raise UserError(f"{folder}: the tensor {others[0]} is not part of the model config.json describes")
    if source.tied_head and HEAD in tensors and not np.array_equal(tensors[HEAD].array(), tensors[EMBEDDING].array()):
        raise UserError(f"{folder}: tie_word_embeddings is true, but {HEAD} isn't {EMBEDDING}")


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Tensor -> the shape that config.json asks for."""
    h, queries, keys = source.hidden_size, source.heads * source.head_size, source.kv_heads * source.head_size
    met = {"plain": (), "head_norm": (source.head_size,) * 2, "norm": (queries, keys)}[source.kind.queries]
    sizes: dict[str, list[tuple[int, ...]]] = {leaf: [(h,)] for leaf in source.kind.norms}
    sizes |= {leaf: [(size,)] for leaf, size in zip(_QUERIES, met, strict=False)}
    sizes |= {
        "attention.qkv": [(queries, h), (keys, h), (keys, h)],
        "attention.out": [(h, queries)],
        "feed_forward.gate": [(source.mlp_size, h)],
        "feed_forward.up": [(source.mlp_size, h)],
        "feed_forward.out": [(h, source.mlp_size)],
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (source.vocab_size, h), FINAL_NORM: (h,)}
    if not source.tied_head:
        shapes[HEAD] = (source.vocab_size, h)
    for i in range(source.layers):
        for leaf, names in _layer_tensors(source.kind, i).items():
            shapes |= dict(zip(names, sizes[leaf], strict=True))
    return shapes
