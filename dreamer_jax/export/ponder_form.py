"""Folders of the family `ponder`: the settings under their own names, and tensors as PyTorch names them."""

from __future__ import annotations

from dreamer_jax.config.models.ponder import PonderConfig
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

`depth` allows another number of passes than {depth}."""


class PonderForm(CausalForm):
    """See the module."""

    family = "ponder"
    model_type = "ponder"
    model_file = "modeling_ponder.py"
    config = PonderConfig
    classes = "Ponder"
    order = ("embedding", "layers", "final_norm", "head")

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Sizes, and what is applied again."""
        model = description.model
        return About(
            ("ponder-lm", "latent-reasoning"),
            f"PonderLM, {model.layers} layers {model.depth} times",
            f"""\
A causal language model of {model.layers} layers that are applied {model.depth} times, written by `dreamer export`.
After every pass but the last its prediction comes back to its input, as a mean of embeddings. Hidden size \
{model.hidden_size}, feed-forward {model.mlp_size}, vocabulary {model.vocab_size}.

Matrices are {description.dtype}; norms are float32.""",
            _USE.format(depth=model.depth),
        )
