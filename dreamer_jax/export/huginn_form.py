"""Folders of the family `huginn`: what the published code loads, and what is published or was retrofitted in its form.

The layers' form is told by the tensors: retrofitted Llamas keep every name and key, and have two norms a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.huginn import HuginnConfig
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
from dreamer_jax.export.huginn import MODEL_TYPE, Name, interleaved, names_of, shape_of, to_leaf, to_tensor
from dreamer_jax.export.huginn_settings import BLOCK_SIZE, read_model, write_model
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import PIECE_BYTES, Stored, Tensor, open_tensors

EMBEDDING, HEAD, ROTATIONS = "transformer.wte.weight", "lm_head.weight", "freqs_cis"

_FORMS = {
    "sandwich": "norms before and behind every attention and feed-forward network",
    "pre_norm": "layers as in Llama",
}

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20, num_steps={steps})[0]))
```

`num_steps` is the number of recurrences, {steps} by default. Names, shapes and keys are those of the published
Huginn, so that its own modelling code loads these files too."""


class HuginnForm(Form):
    """See the module."""

    family = "huginn"
    model_type = MODEL_TYPE
    model_file = "modeling_huginn.py"
    packages = ("torch", "safetensors", "transformers")

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
        """The published keys, and the run."""
        return {
            "architectures": ["HuginnForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_huginn.HuginnConfig",
                "AutoModelForCausalLM": "modeling_huginn.HuginnForCausalLM",
            },
            "model_type": self.model_type,
            "torch_dtype": description.dtype,
            **write_model(description.model),
            "block_size": description.config.data.sequence_length,
            "max_position_embeddings": description.config.data.sequence_length,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos,
            "pad_token_id": tokenizer.pad,
            "training_run": training_run(description),
        }

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """Layers and dtype are read off the tensors; without a run, its data come from the folder."""
        path, tensors = folder / "config.json", open_tensors(folder)
        dtype = dtype_of(folder, tensors, EMBEDDING, HEAD)
        values, step, meta = read_training_run(path, content)
        if not values:
            values, meta = _without_run(folder, content, dtype, tensors[EMBEDDING].shape[0])
        values = {key: checked(path, key, value, HuginnConfig) for key, value in values.items()}
        pre_norm = not any(name.endswith(".norm_3.weight") for name in tensors)
        for name, value in read_model(path, content, pre_norm, values).items():
            values[f"model.{name}"] = value
        values["model.family"] = self.family
        loaded = build({key: Setting(value, str(path)) for key, value in values.items()})
        return Description(loaded.config, loaded.origins, dtype, False, step, meta)

    # Tensors

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """One leaf is in memory at a time, where rows of the tensor are columns of the leaf."""
        found: dict[str, list[Name]] = {}
        for name in names_of(description.model):
            found.setdefault(name.tensor, []).append(name)
        return [_tensor(stored, names, description) for names in found.values()]

    def derived(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """The tied head, and the published code's table of rotations, which it doesn't compute where it loads one."""
        model, found = description.model, []
        if model.tied_head:
            leaf = stored.leaf("params", "embedding")
            found.append(Tensor(HEAD, CODES[description.dtype], leaf.shape, lambda start, stop: leaf[start:stop]))
        if interleaved(model):
            shape = (1, description.config.data.sequence_length, 1, model.head_size // 2, 2)
            found.append(Tensor(ROTATIONS, "F32", shape, lambda start, stop: rotations(shape, model.rope_base)))
        return found

    def without_derived(self, folder: Path, tensors: dict[str, Stored], description: Description) -> dict[str, Stored]:
        """Less rotations, which follow from config.json, and less a tied head, which has to be the embedding or, where
        only one of them was saved, stands for it."""
        kept = {name: tensor for name, tensor in tensors.items() if name != ROTATIONS}
        head = kept.pop(HEAD, None) if description.model.tied_head else None
        if head is not None and EMBEDDING not in kept:
            return {EMBEDDING: head, **kept}
        if head is not None and not _equal(head, kept[EMBEDDING]):
            raise UserError(f"{folder}: {HEAD} differs from {EMBEDDING}, to which tie_embeddings ties it")
        return kept

    def shapes(self, description: Description) -> dict[str, tuple[int, ...]]:
        """Those of the leaves, transposed."""
        params = abstract(description.model)["params"]
        return {
            name.tensor: shape_of(name, tuple(at(params, name.leaf).shape), description.model)
            for name in names_of(description.model)
        }

    def leaves(self, tensors: Mapping[str, Stored], description: Description) -> Iterator[Leaf]:
        """Transposed."""
        for name in names_of(description.model):
            yield Leaf("params", name.leaf, None, to_leaf(name, tensors[name.tensor].array(), description.model))

    def parts(self, description: Description) -> dict[str, str]:
        """A layer, or what stands between them."""
        return {name.tensor: _part(name.leaf) for name in names_of(description.model)}

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See huginn_sides.py."""
        from dreamer_jax.export.huginn_sides import torch_side

        return torch_side(folder, tokens, prompt, new, bfloat16)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See huginn_sides.py."""
        from dreamer_jax.export.huginn_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes and layers."""
        model = description.model
        layers = f"{model.prelude_layers}+{model.core_layers}+{model.coda_layers} layers"
        return About(
            ("huginn", "depth-recurrent"),
            f"Huginn, {layers}, {model.depth} recurrences",
            f"""\
A causal language model of latent recurrent depth, in the form of Huginn, written by `dreamer export`. A prelude of
{model.prelude_layers} layers embeds the tokens, a core of {model.core_layers} is applied again and again, on average
{model.depth} times, and a coda of {model.coda_layers} reads the last state; {_FORMS[model.form]}.
Hidden size {model.hidden_size}, feed-forward {model.mlp_size}, vocabulary {model.vocab_size}.

Tensors are {description.dtype}.""",
            _USE.replace("{steps}", str(model.depth)),
        )


def rotations(shape: tuple[int, ...], base: float) -> np.ndarray:
    """[1, S, 1, d/2, 2] float32: cosine and sine of every position and pair."""
    frequency = np.float32(base) ** (-np.arange(shape[3], dtype=np.float32) / np.float32(shape[3]))
    angle = np.arange(shape[1], dtype=np.float32)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(shape)


def _without_run(
    folder: Path, content: Mapping[str, Any], dtype: str, vocabulary: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings, meta) of a run for a folder that came from none."""
    block = content.get("block_size")
    return without_run(folder, min(block, BLOCK_SIZE) if type(block) is int else BLOCK_SIZE, dtype, vocabulary)


def _tensor(stored: StoredModel, names: list[Name], description: Description) -> Tensor:
    """One tensor of one leaf, or of two, one after the other."""
    first, model = names[0], description.model
    leaves = [stored.leaf("params", name.leaf) for name in names]
    shape = shape_of(first, leaves[0].shape, model)

    @functools.lru_cache(maxsize=1)
    def whole() -> np.ndarray:
        parts = [to_tensor(name, leaf[:], model) for name, leaf in zip(names, leaves, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(start: int, stop: int) -> np.ndarray:
        if first.kind == "same":
            return leaves[0][start:stop]
        rows = whole()[start:stop]
        if stop == shape[0]:
            whole.cache_clear()
        return rows

    return Tensor(first.tensor, CODES[description.dtype], shape, read)


def _equal(a: Stored, b: Stored) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = a.array().reshape(-1).view(np.uint8), b.array().reshape(-1).view(np.uint8)
    return all(
        np.array_equal(one[start : start + PIECE_BYTES], other[start : start + PIECE_BYTES])
        for start in range(0, len(one), PIECE_BYTES)
    )


def _part(leaf: str) -> str:
    """`core.1.attention.qkv` -> core layer 1."""
    part, _, rest = leaf.partition(".")
    return f"{part} layer {rest.partition('.')[0]}" if rest else part.replace("_", " ")
