"""Folders of the family `moeut`: tensors as the published code names them, and a config.json, which it doesn't have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.models.moeut import MoeutConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export.causal_form import CausalForm
from dreamer_jax.export.form import About, Description, dtype_of, without_run
from dreamer_jax.export.moeut import EMBEDDING, names_of, sizes_of, turned
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import INDEX, SINGLE, open_tensors

ROW_LENGTH = 1024
"""Rows of a run that goes on with a published model: those it was trained with."""

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

`depth` allows another number of repeats than {repeats}. Names and shapes of the tensors are those of the published
code, whose model loads them as its state dict."""


class MoeutForm(CausalForm):
    """See the module."""

    family = "moeut"
    model_type = "moeut"
    model_file = "modeling_moeut.py"
    config = MoeutConfig
    classes = "Moeut"

    # config.json

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """What config.json doesn't say is read off the shapes, as far as they tell; without a run, its data come from
        the folder."""
        tensors = open_tensors(folder)
        sizes = sizes_of({name: its.shape for name, its in tensors.items()})
        missing = [name for name in _untold(sizes) if name not in content]
        if missing:
            raise UserError(f"{folder / 'config.json'}: {' and '.join(missing)} missing; tensors don't tell, so add it")
        if not content.get("training_run"):
            values, meta = without_run(
                folder, ROW_LENGTH, dtype_of(folder, tensors, EMBEDDING), tensors[EMBEDDING].shape[0]
            )
            content = content | {"training_run": {"step": 0, "meta": meta, "config": values}}
        return super().read(folder, sizes | content)

    def asks(self, folder: Path) -> str:
        """A published state dict has none, and alone it isn't enough."""
        if not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
            return ""
        sizes = sizes_of({name: its.shape for name, its in open_tensors(folder).items()})
        if not sizes:
            return ""
        wanted = json.dumps({"model_type": self.model_type, **dict.fromkeys(_untold(sizes), 0)})
        repeats = "depth is how often the group of layers is repeated"
        return f"the tensors are MoEUT's: write {wanted} there, with the model's numbers for the zeros ({repeats})"

    # Tensors

    def present(self, description: Description) -> list[tuple[str, str]]:
        """All that the model has."""
        return list(names_of(description.model))

    def _to_tensor(self, leaf: str, values: np.ndarray) -> np.ndarray:
        return turned(leaf, values)

    def parts(self, description: Description) -> dict[str, str]:
        """A half of a layer, or what stands beside them."""
        found = {}
        for leaf, tensor in names_of(description.model):
            first, *rest = leaf.split(".")
            found[tensor] = f"{rest[1]} of layer {rest[0]}" if first == "layers" else first
        return found

    # Comparing and describing

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See moeut_sides.py."""
        from dreamer_jax.export.moeut_sides import JaxSide

        return JaxSide(folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes, repeats and experts."""
        model = description.model
        return About(
            ("universal-transformer", "mixture-of-experts"),
            f"MoEUT, {model.layers} layers, {model.depth} repeats",
            f"""\
A causal language model with the tensors of MoEUT, written by `dreamer export`: a group of {model.layers} layers that is
applied {model.depth} times, each with {model.num_experts} experts of {model.expert_size}, {model.experts_per_token} \
active, and {model.heads} heads with {model.attention_experts} experts each for values and outputs. Hidden size \
{model.hidden_size}, vocabulary {model.vocab_size}.

Matrices are {description.dtype}; norms, biases and what selects experts are float32.""",
            _USE.format(repeats=model.depth),
        )


def _untold(sizes: dict[str, int]) -> list[str]:
    """Settings that shapes can't tell."""
    asked = ["depth", "experts_per_token", "attention_experts_per_token"]
    return asked[:-1] if sizes.get("attention_experts") == 1 else asked
