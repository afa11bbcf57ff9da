"""Folders of the family `recursive`: the settings under their own names, and a tensor for every leaf, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from dreamer_jax.blocks.parameters import FLOAT32
from dreamer_jax.config.models.recursive import RecursiveConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.form import CODES, About, Description, TorchSide, abstract, at
from dreamer_jax.export.plain_form import PlainForm
from dreamer_jax.export.safetensors_files import Tensor
from dreamer_jax.families import build
from dreamer_jax.runs.leaves import StoredModel

ORDER = ("embedding", "first", "layers", "relaxation", "last", "final_norm", "head")
"""Parts of the parameters in the order of the forward pass."""

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

Tensors have the names and shapes that they have in JAX: matrices are [in, out], and what a layer has of its own at
every application is stacked. All loops are computed here; `exit_confidence` and `exit_change` are for `dreamer
generate`."""


class RecursiveForm(PlainForm):
    """See the module."""

    family = "recursive"
    model_type = "recursive"
    model_file = "modeling_recursive.py"
    config = RecursiveConfig
    names = {"embedding": "embedding"}  # noqa: RUF012
    tables = ()
    packages = ("torch", "safetensors", "transformers")

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
        """The section `model`, and the run."""
        return {
            "architectures": ["RecursiveForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_recursive.RecursiveConfig",
                "AutoModelForCausalLM": "modeling_recursive.RecursiveForCausalLM",
            },
            **self.described(description),
            "max_position_embeddings": description.config.data.sequence_length,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos,
            "pad_token_id": tokenizer.pad,
        }

    # Tensors

    def present(self, description: Description) -> list[tuple[str, str]]:
        """Every leaf under its own name."""
        leaves = jax.tree_util.tree_leaves_with_path(abstract(description.model)["params"])
        paths = [[key.key for key in path] for path, _ in leaves]
        names = [".".join(path) for path in sorted(paths, key=lambda path: ORDER.index(path[0]))]
        return list(zip(names, names, strict=True))

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """Read when they are written, because a converted model may be large; norms stay float32, as in JAX."""
        roles = build(description.model).roles

        def tensor(name: str) -> Tensor:
            leaf = stored.leaf("params", name)
            dtype = "float32" if at(roles, name) in FLOAT32 else description.dtype
            return Tensor(name, CODES[dtype], leaf.shape, lambda start, stop: leaf[start:stop])

        return [tensor(name) for name, _ in self.present(description)]

    def _to_tensor(self, leaf: str, values: np.ndarray) -> np.ndarray:
        return values

    def parts(self, description: Description) -> dict[str, str]:
        """The part of the parameters, with the layer's number where it has one."""
        splits = {name: name.split(".") for name, _ in self.present(description)}
        return {name: " ".join(path[: 2 if path[1:2] and path[1].isdigit() else 1]) for name, path in splits.items()}

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See recursive_sides.py."""
        from dreamer_jax.export.recursive_sides import torch_side

        return torch_side(folder, tokens, prompt, new, bfloat16)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See recursive_sides.py."""
        from dreamer_jax.export.recursive_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes, and how layers are shared."""
        model = description.model
        relaxed = f", relaxed by LoRA of rank {model.rank}" if model.rank else ""
        return About(
            ("recursive-transformer", "layer-sharing"),
            f"Recursive transformer, {model.layers} layers {model.depth} times",
            f"""\
A causal language model of {model.layers} transformer layers, each applied {model.depth} times \
({model.sharing}){relaxed}, written by `dreamer export`. Hidden size {model.hidden_size}, feed-forward \
{model.mlp_size}, vocabulary {model.vocab_size}.

Matrices are {description.dtype}; norms are float32.""",
            _USE,
        )
