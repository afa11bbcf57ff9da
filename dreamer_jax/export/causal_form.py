"""Folders of causal language models without a published form: a tensor for every leaf, named after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.form import Description, TorchSide, abstract
from dreamer_jax.export.plain_form import PlainForm

TRANSPOSED = ("qkv", "out")
"""How the paths of leaves end that are [in, out] in JAX; other matrices are [out, in] in both."""


class TransformersForm(PlainForm):
    """What folders have that transformers loads as causal language models, whatever their tensors are called."""

    classes: ClassVar[str]
    """How the names of the PyTorch classes begin, in front of Config and ForCausalLM."""
    packages = ("torch", "safetensors", "transformers")

    def settings(self, description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
        """The section `model`, and the run."""
        module, model = self.model_file.removesuffix(".py"), f"{self.classes}ForCausalLM"
        return {
            "architectures": [model],
            "auto_map": {
                "AutoConfig": f"{module}.{self.classes}Config",
                "AutoModelForCausalLM": f"{module}.{model}",
            },
            **self.described(description),
            "max_position_embeddings": description.config.data.sequence_length,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos,
            "pad_token_id": tokenizer.pad,
        }


class CausalForm(TransformersForm):
    """Tensors that are named after the leaves. A layer's number is in the names of both."""

    order: ClassVar[tuple[str, ...]]
    """Parts of the parameters in the order of the forward pass."""
    names = {"embedding": "embedding.weight"}  # noqa: RUF012
    tables = ()

    # Tensors

    def present(self, description: Description) -> list[tuple[str, str]]:
        """Every leaf; one path after the other, part by part."""
        leaves = jax.tree_util.tree_leaves_with_path(abstract(description.model)["params"])
        paths = sorted(([key.key for key in path] for path, _ in leaves), key=lambda path: self.order.index(path[0]))
        return [(".".join(path), self.tensor_of(".".join(path))) for path in paths]

    def tensor_of(self, leaf: str) -> str:
        """The tensor of a leaf: what a module calls its matrix or scale is `weight`."""
        return f"{leaf.removesuffix('.scale')}.weight"

    def _to_tensor(self, leaf: str, values: np.ndarray) -> np.ndarray:
        return values.T if leaf.rpartition(".")[2] in TRANSPOSED else values

    def parts(self, description: Description) -> dict[str, str]:
        """The part of the parameters, with the layer's number where it has one."""
        splits = {name: leaf.split(".") for leaf, name in self.present(description)}
        return {name: " ".join(path[: 2 if path[1:2] and path[1].isdigit() else 1]) for name, path in splits.items()}

    # Comparing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See causal_sides.py."""
        from dreamer_jax.export.causal_sides import torch_model, torch_side

        return torch_side(torch_model(self, folder), tokens, prompt, new, bfloat16)

    def jax_side(self, stored: Any, folder: Path, description: Description, dtype: str) -> Any:
        """See causal_sides.py."""
        from dreamer_jax.export.causal_sides import JaxSide

        return JaxSide(folder, description, dtype)
