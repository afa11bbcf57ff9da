"""Folders of the family `recursive`: the settings under their own names, and a tensor for every leaf, as it is."""

from __future__ import annotations

import numpy as np

from dreamer_jax.blocks.parameters import FLOAT32
from dreamer_jax.config.models.recursive import RecursiveConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.causal_form import CausalForm
from dreamer_jax.export.form import CODES, About, Description, at
from dreamer_jax.families import build
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import Tensor

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


class RecursiveForm(CausalForm):
    """See the module."""

    family = "recursive"
    model_type = "recursive"
    model_file = "modeling_recursive.py"
    config = RecursiveConfig
    names = {"embedding": "embedding"}  # noqa: RUF012
    classes = "Recursive"
    order = ("embedding", "first", "layers", "relaxation", "last", "final_norm", "head")

    # Tensors

    def tensor_of(self, leaf: str) -> str:
        """Every leaf under its own name."""
        return leaf

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

    # Describing

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
