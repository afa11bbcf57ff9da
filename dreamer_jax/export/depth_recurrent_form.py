"""Folders of the family `depth_recurrent`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dreamer_jax.blocks.parameters import FLOAT32
from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.depth_recurrent import DepthRecurrentConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export.form import (
    CODES,
    About,
    Description,
    Form,
    Leaf,
    TorchSide,
    abstract,
    at,
    checked,
    read_training_run,
    training_run,
)
from dreamer_jax.export.safetensors_files import Stored, Tensor, open_tensors
from dreamer_jax.families import build as build_family
from dreamer_jax.runs.leaves import StoredModel

NAMES = {
    "embedding": "embedding.weight",
    "depth_embedding": "depth_embedding.weight",
    "core.attention_norm.scale": "attention_norm.weight",
    "core.attention_norm.bias": "attention_norm.bias",
    "core.attention.qkv": "attention.in_proj.weight",
    "core.attention.qkv_bias": "attention.in_proj.bias",
    "core.attention.out": "attention.out_proj.weight",
    "core.attention.out_bias": "attention.out_proj.bias",
    "core.attention_scale.factor": "attention_scale",
    "core.mlp_norm.scale": "mlp_norm.weight",
    "core.mlp_norm.bias": "mlp_norm.bias",
    "core.feed_forward.in_matrix": "feed_forward.inward.weight",
    "core.feed_forward.in_bias": "feed_forward.inward.bias",
    "core.feed_forward.out_matrix": "feed_forward.outward.weight",
    "core.feed_forward.out_bias": "feed_forward.outward.bias",
    "core.mlp_scale.factor": "mlp_scale",
    "core.gate.matrix": "gate.weight",
    "core.gate.bias": "gate.bias",
    "classifier.hidden": "classifier.hidden.weight",
    "classifier.hidden_bias": "classifier.hidden.bias",
    "classifier.out": "classifier.out.weight",
    "classifier.out_bias": "classifier.out.bias",
}
"""Leaf, its path joined by dots -> tensor, in the order of the forward pass. Matrices are [out, in] in PyTorch; tables
of embeddings are as they are."""
TABLES = ("embedding", "depth_embedding")
NOT_DESCRIBED = ("family", "dtype", "implementation")
"""Settings that config.json leaves to `model_type`, to the tensors, and to the machine."""

_USE = """\
```python
import sys

sys.path.append("FOLDER")
from modeling_depth_recurrent import DepthRecurrent

model = DepthRecurrent.load("FOLDER")
logits = model(tokens, read{visible}, steps={steps})  # [{steps}, B, {classes}], after every step
```

`tokens` [B, S] are at most {vocabulary}, `read` [B, {positions}] are the positions whose states answer{more}."""


class DepthRecurrentForm(Form):
    """See the module."""

    family = "depth_recurrent"
    model_type = "depth_recurrent"
    model_file = "modeling_depth_recurrent.py"
    texts = False

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """The section `model`, and the run."""
        fields = dataclasses.asdict(description.model)
        return {
            "architectures": ["DepthRecurrent"],
            "model_type": self.model_type,
            "torch_dtype": description.dtype,
            **{name: value for name, value in fields.items() if name not in NOT_DESCRIBED},
            "training_run": training_run(description),
        }

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """The dtype is read off the tensors; what config.json says of the model counts more than the run."""
        path, tensors = folder / "config.json", open_tensors(folder)
        name = NAMES["embedding"]
        if name not in tensors:
            raise UserError(f"{folder}: the tensor {name} is missing")
        dtype = next(its for its, code in CODES.items() if code == tensors[name].dtype)
        values, step, meta = read_training_run(path, content)
        for field in dataclasses.fields(DepthRecurrentConfig):
            if field.name not in NOT_DESCRIBED and field.name in content:
                values[f"model.{field.name}"] = content[field.name]
        values = {key: checked(path, key, value, DepthRecurrentConfig) for key, value in values.items()}
        values |= {"model.family": self.family, "model.dtype": values.get("model.dtype", dtype)}
        loaded = build({key: Setting(value, str(path)) for key, value in values.items()})
        return Description(loaded.config, loaded.origins, dtype, False, step, meta)

    # Tensors

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """All of them are small; biases, norms, LayerScale and the gate stay float32, as in JAX."""
        roles = build_family(description.model).roles

        def tensor(leaf: str, name: str) -> Tensor:
            values = _turned(leaf, stored.leaf("params", leaf)[:])
            dtype = "float32" if at(roles, leaf) in FLOAT32 else description.dtype
            return Tensor(name, CODES[dtype], values.shape, lambda start, stop: values[start:stop])

        return [tensor(leaf, name) for leaf, name in _names(description)]

    def shapes(self, description: Description) -> dict[str, tuple[int, ...]]:
        """Those of the leaves, matrices transposed."""
        params = abstract(description.model)["params"]
        return {name: _turned(leaf, np.empty(at(params, leaf).shape)).shape for leaf, name in _names(description)}

    def leaves(self, tensors: Mapping[str, Stored], description: Description) -> Iterator[Leaf]:
        """Matrices transposed back."""
        for leaf, name in _names(description):
            yield Leaf("params", leaf, None, _turned(leaf, tensors[name].array()))

    def parts(self, description: Description) -> dict[str, str]:
        """The tensor's own module."""
        return {name: name.partition(".")[0].replace("_", " ") for _, name in _names(description)}

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See depth_recurrent_sides.py."""
        from dreamer_jax.export.depth_recurrent_sides import torch_side

        return torch_side(folder, tokens, bfloat16)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See depth_recurrent_sides.py."""
        from dreamer_jax.export.depth_recurrent_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer | None) -> About:
        """Sizes and how to call it."""
        model, graph = description.model, description.model.positions == "none"
        use = _USE.format(
            visible=", visible=visible" if graph else "",
            steps=model.depth,
            classes=model.classes,
            vocabulary=model.vocab_size - 1,
            positions=1 if model.readout == "cls" else 2,
            more=",\nand `visible` [B, S, S] says whether row i sees column j" if graph else "",
        )
        return About(
            ("depth-recurrent", "classification"),
            f"Depth-recurrent transformer, {model.depth_min} to {model.depth} thinking steps",
            f"""\
A classifier of rows by a depth-recurrent transformer, written by `dreamer export`: one block with a gate, applied up to
{model.depth} times in training. Hidden size {model.hidden_size}, feed-forward {model.mlp_size}, vocabulary \
{model.vocab_size}.

Matrices are {description.dtype}; biases, norms and the gate are float32.""",
            use,
        )


def _names(description: Description) -> list[tuple[str, str]]:
    """(leaf, tensor) of those that the model has."""
    has = {
        ".".join(key.key for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(abstract(description.model)["params"])
    }
    return [(leaf, name) for leaf, name in NAMES.items() if leaf in has]


def _turned(leaf: str, values: np.ndarray) -> np.ndarray:
    """A leaf as its tensor, or the other way round."""
    return values.T if values.ndim == 2 and leaf not in TABLES else values
