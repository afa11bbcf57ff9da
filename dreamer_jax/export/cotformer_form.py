"""Folders of the family `cotformer`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.models.cotformer import CotformerConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.causal_form import TransformersForm
from dreamer_jax.export.form import About, Description, TorchSide
from dreamer_jax.runs.leaves import StoredModel

LAYER = {
    "attention_norm.scale": "attention_norm.weight",
    "attention.qkv": "attention.qkv.weight",
    "attention.out": "attention.out.weight",
    "mlp_norm.scale": "mlp_norm.weight",
    "feed_forward.in_matrix": "inward.weight",
    "feed_forward.out_matrix": "outward.weight",
}
"""Leaf -> tensor, both behind the layer's own name, in the order of the forward pass."""
NAMES = {
    "embedding": "embedding.weight",
    "depth_embedding": "depth_embedding",
    "repeat_norm": "repeat_norm.weight",
    "routers.row": "routers",
    "final_norm": "final_norm.weight",
}
"""Leaf -> tensor, of what isn't in a layer. Matrices of layers are [out, in] in PyTorch, these are as they are."""

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

`depth` allows {others} repeats than {repeats}."""


class CotformerForm(TransformersForm):
    """See the module."""

    family = "cotformer"
    model_type = "cotformer"
    model_file = "modeling_cotformer.py"
    classes = "Cotformer"
    config = CotformerConfig
    names = NAMES
    tables = tuple(NAMES)

    # Tensors

    def present(self, description: Description) -> list[tuple[str, str]]:
        """(leaf, tensor) in the order of the forward pass; layers have numbers."""
        first, *others = super().present(description)
        found, model = [first], description.model
        for part in ("begin", "middle", "end"):
            for number in range(getattr(model, f"{part}_layers")):
                found += [(f"{part}.{number}.{leaf}", f"{part}.{number}.{name}") for leaf, name in LAYER.items()]
        return found + others

    def parts(self, description: Description) -> dict[str, str]:
        """The layer, or the tensor's own module."""
        named = {}
        for leaf, name in self.present(description):
            part, _, rest = leaf.partition(".")
            named[name] = f"{part} layer {rest.partition('.')[0]}" if rest[:1].isdigit() else part.replace("_", " ")
        return named

    # Comparing and describing

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """See cotformer_sides.py."""
        from dreamer_jax.export.causal_sides import torch_model, torch_side
        from dreamer_jax.export.cotformer_sides import torch_trace

        return torch_side(torch_model(self, folder), tokens, prompt, new, bfloat16, torch_trace)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See cotformer_sides.py."""
        from dreamer_jax.export.cotformer_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes, and whether routers decide how often positions are repeated."""
        model = description.model
        by_repeat = model.adaptive or model.depth_embedding == "learned"
        adaptive = "; routers decide which positions go on after each repeat" if model.adaptive else ""
        return About(
            ("cotformer", *(("mixture-of-repeats",) if model.adaptive else ())),
            f"CoTFormer, {model.middle_layers} layers repeated {model.depth} times",
            f"""\
A causal language model of {model.begin_layers} layers, {model.middle_layers} that are repeated {model.depth} times \
and attend to the keys of all repeats so far, and {model.end_layers} more{adaptive}. Written by
`dreamer export`. Hidden size {model.hidden_size}, feed-forward {model.mlp_size}, vocabulary {model.vocab_size}.

Matrices are {description.dtype}; norms, depth embedding and routers are float32.""",
            _USE.format(others="fewer" if by_repeat else "another number of", repeats=model.depth),
        )
