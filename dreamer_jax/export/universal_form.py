"""Folders of the family `universal`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.blocks.parameters import FLOAT32
from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.universal import UniversalConfig
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
    "layer.attention.qkv": "layer.attention.qkv.weight",
    "layer.attention.out": "layer.attention.out.weight",
    "layer.attention_norm.scale": "layer.attention_norm.weight",
    "layer.attention_norm.bias": "layer.attention_norm.bias",
    "layer.feed_forward.in_matrix": "layer.inward.weight",
    "layer.feed_forward.in_bias": "layer.inward.bias",
    "layer.feed_forward.out_matrix": "layer.outward.weight",
    "layer.feed_forward.out_bias": "layer.outward.bias",
    "layer.mlp_norm.scale": "layer.mlp_norm.weight",
    "layer.mlp_norm.bias": "layer.mlp_norm.bias",
    "halting.row": "halting.weight",
    "halting.bias": "halting.bias",
}
"""Leaf, its path joined by dots -> tensor, in the order of the forward pass. Matrices are [out, in] in PyTorch."""
EMBEDDING, ROW = "embedding", "halting.row"
NOT_DESCRIBED = ("family", "dtype", "implementation")
"""Settings that config.json leaves to `model_type`, to the tensors, and to the machine."""

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

`depth` allows another number of steps than {steps}."""


class UniversalForm(Form):
    """See the module."""

    family = "universal"
    model_type = "universal"
    model_file = "modeling_universal.py"
    packages = ("torch", "safetensors", "transformers")

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
        """The section `model`, and the run."""
        fields = dataclasses.asdict(description.model)
        return {
            "architectures": ["UniversalForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_universal.UniversalConfig",
                "AutoModelForCausalLM": "modeling_universal.UniversalForCausalLM",
            },
            "model_type": self.model_type,
            "torch_dtype": description.dtype,
            **{name: value for name, value in fields.items() if name not in NOT_DESCRIBED},
            "max_position_embeddings": description.config.data.sequence_length,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos,
            "pad_token_id": tokenizer.pad,
            "training_run": training_run(description),
        }

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """The dtype is read off the tensors; what config.json says of the model counts more than the run."""
        path, tensors, name = folder / "config.json", open_tensors(folder), NAMES[EMBEDDING]
        if name not in tensors:
            raise UserError(f"{folder}: the tensor {name} is missing")
        dtype = next(its for its, code in CODES.items() if code == tensors[name].dtype)
        values, step, meta = read_training_run(path, content)
        for field in dataclasses.fields(UniversalConfig):
            if field.name not in NOT_DESCRIBED and field.name in content:
                values[f"model.{field.name}"] = content[field.name]
        values = {key: checked(path, key, value, UniversalConfig) for key, value in values.items()}
        values |= {"model.family": self.family, "model.dtype": values.get("model.dtype", dtype)}
        loaded = build({key: Setting(value, str(path)) for key, value in values.items()})
        return Description(loaded.config, loaded.origins, dtype, False, step, meta)

    # Tensors

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """Biases, norms and the halting unit stay float32, as in JAX."""
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
            values = tensors[name].array()
            yield Leaf("params", leaf, None, values[0] if leaf == ROW else _turned(leaf, values))

    def parts(self, description: Description) -> dict[str, str]:
        """The tensor's own module."""
        return {name: leaf.split(".")[1 if leaf.startswith("layer") else 0] for leaf, name in _names(description)}

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See universal_sides.py."""
        from dreamer_jax.export.universal_sides import torch_side

        return torch_side(folder, tokens, prompt, new, bfloat16)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See universal_sides.py."""
        from dreamer_jax.export.universal_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes and how positions halt."""
        model = description.model
        return About(
            ("universal-transformer", "adaptive-computation-time"),
            f"Universal Transformer, at most {model.depth} steps",
            f"""\
A causal language model of one transformer layer that every position applies as often as it needs, at most {model.depth}
times, written by `dreamer export`. Halting {model.halting}, hidden size {model.hidden_size}, feed-forward \
{model.mlp_size}, vocabulary {model.vocab_size}.

Matrices are {description.dtype}; biases, norms and the halting unit are float32.""",
            _USE.format(steps=model.depth),
        )


def _names(description: Description) -> list[tuple[str, str]]:
    """(leaf, tensor) of those that the model has."""
    has = abstract(description.model)["params"]
    return [(leaf, name) for leaf, name in NAMES.items() if leaf.partition(".")[0] in has]


def _turned(leaf: str, values: np.ndarray) -> np.ndarray:
    """A leaf as its tensor; of a matrix also the other way round."""
    if leaf == ROW:
        return values[None]
    return values.T if values.ndim == 2 and leaf != EMBEDDING else values
