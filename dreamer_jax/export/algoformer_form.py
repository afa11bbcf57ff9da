"""Folders of the family `algoformer`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

from dreamer_jax.config.models.algoformer import AlgoformerConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.export.causal_form import CausalForm
from dreamer_jax.export.form import About, Description

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

`depth` allows another number of loops than {depth}."""


class AlgoformerForm(CausalForm):
    """See the module."""

    family = "algoformer"
    model_type = "algoformer"
    model_file = "modeling_algoformer.py"
    config = AlgoformerConfig
    classes = "Algoformer"
    order = ("embedding", "pre", "loop", "post", "final_norm")

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes, and what is applied again."""
        model = description.model
        layers = f"{model.pre_layers}+{model.loop_layers}x{model.depth}+{model.post_layers} layers"
        return About(
            ("algoformer", "looped-transformer"),
            f"AlgoFormer, {layers}",
            f"""\
A causal language model of three small transformers, written by `dreamer export`: {model.pre_layers} layers prepare,
{model.loop_layers} are applied {model.depth} times, {model.post_layers} read the result off. Hidden size \
{model.hidden_size}, feed-forward {model.mlp_size}, vocabulary {model.vocab_size}.

Matrices are {description.dtype}; norms are float32.""",
            _USE.format(depth=model.depth),
        )
