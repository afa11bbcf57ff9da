"""Folders of the family `depth_recurrent`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.models.depth_recurrent import DepthRecurrentConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.form import (
    About,
    Description,
    TorchSide,
)
from dreamer_jax.export.plain_form import PlainForm
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

_USE = """\
```python
import sys

import torch

sys.path.append("FOLDER")
from modeling_depth_recurrent import DepthRecurrent

model = DepthRecurrent.load("FOLDER")
tokens = torch.zeros(1, 8, dtype=torch.long)  # put a puzzle's in its place
read = torch.tensor([{places}]){matrix}
logits = model(tokens, read{visible}, steps={steps})  # [{steps}, B, {classes}], after every step
```

`tokens` [B, S] are at most {vocabulary}, `read` [B, {positions}] are the positions whose states answer{more}."""


class DepthRecurrentForm(PlainForm):
    """See the module."""

    family = "depth_recurrent"
    model_type = "depth_recurrent"
    model_file = "modeling_depth_recurrent.py"
    config = DepthRecurrentConfig
    names = NAMES
    tables = ("embedding", "depth_embedding")
    texts = False

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """The section `model`, and the run."""
        return {"architectures": ["DepthRecurrent"], **self.described(description)}

    # Tensors

    def parts(self, description: Description) -> dict[str, str]:
        """The tensor's own module."""
        return {name: name.partition(".")[0].replace("_", " ") for _, name in self.present(description)}

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
            places=[0] if model.readout == "cls" else [0, 1],
            matrix="\nvisible = torch.ones(1, 8, 8, dtype=torch.bool)" if graph else "",
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
