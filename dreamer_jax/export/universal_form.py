"""Folders of the family `universal`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.models.universal import UniversalConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.causal_form import TransformersForm
from dreamer_jax.export.form import (
    About,
    Description,
    TorchSide,
)
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

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

`depth` allows another number of steps than {steps}."""


class UniversalForm(TransformersForm):
    """See the module."""

    family = "universal"
    model_type = "universal"
    model_file = "modeling_universal.py"
    classes = "Universal"
    config = UniversalConfig
    names = NAMES
    tables = (EMBEDDING,)
    rows = (ROW,)

    # Tensors

    def parts(self, description: Description) -> dict[str, str]:
        """The tensor's own module."""
        return {name: leaf.split(".")[1 if leaf.startswith("layer") else 0] for leaf, name in self.present(description)}

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See universal_sides.py."""
        from dreamer_jax.export.causal_sides import torch_model, torch_side
        from dreamer_jax.export.universal_sides import torch_trace

        return torch_side(torch_model(self, folder), tokens, prompt, new, bfloat16, torch_trace)

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
