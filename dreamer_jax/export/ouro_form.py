"""Folders of the family `ouro`: what the published code loads, and what is published in its form."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.ouro import OuroConfig
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
    dtype_of,
    read_training_run,
    training_run,
    without_run,
)
from dreamer_jax.export.json_values import number, refuse_other_layers, rope_base, whole
from dreamer_jax.export.ouro import EMBEDDING, MODEL_TYPE, Name, columns_of, names_of, to_leaf
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import Stored, Tensor, open_tensors

SIZES = {
    "total_ut_steps": "depth",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "mlp_size",
    "num_attention_heads": "heads",
    "vocab_size": "vocab_size",
}
"""Key -> our setting; there are no defaults."""
NUMBERS = {
    "rms_norm_eps": ("norm_epsilon", 1e-6),
    "early_exit_threshold": ("exit_threshold", 1.0),
    "initializer_range": ("init_std", 0.02),
    "entropy_weight": ("entropy_weight", 0.1),
}
"""Key -> (our setting, default); the last is ours alone."""
BUILT = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "attention_bias": False,
}
"""Keys of what could be computed, and the one value that is, which is the default."""
ROW_LENGTH = 4096
"""Longest rows of a run that goes on with a published model, unless its data say something else."""

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

`total_ut_steps` is the number of loops, {loops} by default. With `exit_threshold` below 1 each token is read off after
the loop at which the gate stops it; all loops are computed all the same. Names, shapes and keys are those of the
published Ouro, so that its own modelling code loads these files too."""

_LAST = """

The run has `model.cache: last`, which is for `dreamer generate`: there later tokens see the keys of the last loop
alone. Here they see those of the same loop, so that other tokens are written."""


class OuroForm(Form):
    """See the module."""

    family = "ouro"
    model_type = MODEL_TYPE
    model_file = "modeling_ouro.py"
    packages = ("torch", "safetensors", "transformers")

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
        """The published keys, and the run."""
        model = description.model
        return {
            "architectures": ["OuroForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_ouro.OuroConfig",
                "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
            },
            "model_type": self.model_type,
            "torch_dtype": description.dtype,
            **{key: getattr(model, ours) for key, ours in SIZES.items()},
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_size,
            "rope_theta": model.rope_base,
            **{key: getattr(model, ours) for key, (ours, _) in NUMBERS.items()},
            **BUILT,
            "layer_types": ["full_attention"] * model.layers,
            "max_position_embeddings": description.config.data.sequence_length,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos,
            "pad_token_id": tokenizer.pad,
            "training_run": training_run(description),
        }

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """The dtype is read off the tensors; without a run, its data come from the folder."""
        path, tensors = folder / "config.json", open_tensors(folder)
        dtype = dtype_of(folder, tensors, EMBEDDING)
        values, step, meta = read_training_run(path, content)
        if not values:
            length = min(whole(path, content, "max_position_embeddings", ROW_LENGTH), ROW_LENGTH)
            values, meta = without_run(folder, length, dtype, tensors[EMBEDDING].shape[0])
        values = {key: checked(path, key, value, OuroConfig) for key, value in values.items()}
        values |= {f"model.{name}": value for name, value in _read_model(path, content).items()}
        values["model.family"] = self.family
        loaded = build({key: Setting(value, str(path)) for key, value in values.items()})
        return Description(loaded.config, loaded.origins, dtype, False, step, meta)

    # Tensors

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """One leaf is in memory at a time, where rows of the tensor are columns of the leaf."""
        return [
            _tensor(stored, name, i, description)
            for name in names_of(description.model)
            for i in range(len(name.tensors))
        ]

    def shapes(self, description: Description) -> dict[str, tuple[int, ...]]:
        """Those of the leaves, transposed."""
        params, found = abstract(description.model)["params"], {}
        for name in names_of(description.model):
            leaf = tuple(at(params, name.leaf).shape)
            for i, tensor in enumerate(name.tensors):
                found[tensor] = _shape(name, i, leaf, description.model)
        return found

    def leaves(self, tensors: Mapping[str, Stored], description: Description) -> Iterator[Leaf]:
        """Transposed, and put side by side."""
        for name in names_of(description.model):
            arrays = {tensor: tensors[tensor].array() for tensor in name.tensors}
            yield Leaf("params", name.leaf, None, to_leaf(name, arrays))

    def parts(self, description: Description) -> dict[str, str]:
        """A layer, or what stands beside them."""
        return {tensor: _part(name.leaf) for name in names_of(description.model) for tensor in name.tensors}

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See ouro_sides.py."""
        from dreamer_jax.export.ouro_sides import torch_side

        return torch_side(folder, tokens, prompt, new, bfloat16)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See ouro_sides.py."""
        from dreamer_jax.export.ouro_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes and loops."""
        model = description.model
        return About(
            ("ouro", "depth-recurrent"),
            f"Ouro, {model.layers} layers, {model.depth} loops",
            f"""\
A looped causal language model, in the form of Ouro, written by `dreamer export`. A stack of {model.layers} layers is
applied {model.depth} times, and after each loop a gate says with which probability a token stops there.
Hidden size {model.hidden_size}, feed-forward {model.mlp_size}, vocabulary {model.vocab_size}.

Tensors are {description.dtype}.""",
            _USE.replace("{loops}", str(model.depth)) + (_LAST if model.cache == "last" else ""),
        )


def _read_model(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the section `model` that config.json decides.

    Raises:
        UserError: a value is broken, or one of a model that can't be computed.
    """
    for key, value in BUILT.items():
        found = content.get(key)
        if found is not None and found != value:
            raise UserError(f"{path}: {key} is {found!r}; only models with {value!r} can be computed")
    refuse_other_layers(path, content)
    if content.get("early_exit_step") is not None:
        raise UserError(f"{path}: early_exit_step stops at one loop; remove it, and set total_ut_steps to that loop")
    model: dict[str, Any] = {ours: whole(path, content, key) for key, ours in SIZES.items()}
    model |= {ours: number(path, content, key, default) for key, (ours, default) in NUMBERS.items()}
    heads = model["heads"]
    if content.get("head_dim") is None and (heads < 1 or model["hidden_size"] % heads):
        raise UserError(f"{path}: num_attention_heads {heads} does not divide hidden_size {model['hidden_size']}")
    return model | {
        "kv_heads": whole(path, content, "num_key_value_heads", heads),
        "head_size": whole(path, content, "head_dim", model["hidden_size"] // max(heads, 1)),
        "rope_base": rope_base(path, content),
    }


def _shape(name: Name, i: int, leaf: tuple[int, ...], model: OuroConfig) -> tuple[int, ...]:
    """The shape of the i-th tensor of a leaf."""
    if name.kind == "matrix":
        start, stop = columns_of(name, model)[i]
        return stop - start, leaf[0]
    return (1, *leaf) if name.kind == "row" else leaf


def _tensor(stored: StoredModel, name: Name, i: int, description: Description) -> Tensor:
    """The i-th tensor of a leaf."""
    leaf, model = stored.leaf("params", name.leaf), description.model
    shape = _shape(name, i, leaf.shape, model)

    @functools.lru_cache(maxsize=1)
    def rows() -> np.ndarray:
        if name.kind == "row":
            return leaf[:][None]
        return leaf[:].T[slice(*columns_of(name, model)[i])]

    def read(start: int, stop: int) -> np.ndarray:
        if name.kind == "same":
            return leaf[start:stop]
        piece = rows()[start:stop]
        if stop == shape[0]:
            rows.cache_clear()
        return piece

    return Tensor(name.tensors[i], CODES[description.dtype], shape, read)


def _part(leaf: str) -> str:
    """`layers.1.attention.qkv` -> layer 1."""
    part, _, rest = leaf.partition(".")
    return f"layer {rest.partition('.')[0]}" if part == "layers" else part.replace("_", " ")
