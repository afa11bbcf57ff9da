"""Folders of the family `dreamer`: tensors in the layout of training, shared experts folded or kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.export.form import (
    CODES,
    About,
    Description,
    Form,
    Leaf,
    TorchSide,
    Trace,
    abstract,
    at,
    checked,
    read_training_run,
    training_run,
)
from dreamer_jax.export.names import Name, fold, names_of
from dreamer_jax.runs.leaves import StoredModel
from dreamer_jax.runs.safetensors_files import Stored, Tensor

FORMAT_VERSION = 1
NOT_DESCRIBED = ("family", "implementation", "dtype", "balancing_boost", "balancing_boost_steps", "balancing_groups")
"""Settings that `model_type` says, that say how to compute in JAX, not what, or when biases move in training."""

READ_BYTES = 1 << 36
"""Of expert matrices, all that comparing may read on one side: a minute or two."""

_KINDS = {
    "LA": "every depth has a layer of its own",
    "LA+DA": "every depth has a layer of its own, and tokens also attend to their earlier depths",
    "DR": "one layer is applied at every depth",
    "DR+DA": "one layer is applied at every depth, and tokens also attend to their earlier depths",
}

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

Without transformers, from inside the folder (torch and safetensors are all it needs):

```python
import torch
from modeling_dreamer import Dreamer

model = Dreamer.load(".")
print(model.generate(torch.tensor([[{bos}]]), max_new_tokens=20))
```
"""


class DreamerForm(Form):
    """See the module."""

    family = "dreamer"
    model_type = "dreamer"
    model_file = "modeling_dreamer.py"

    def has_shared(self, model: DreamerConfig) -> bool:
        """Attention MoEs have, unless `model.shared_expert` is off."""
        return model.shared_experts

    # config.json

    def settings(self, description: Description, tokenizer: Tokenizer) -> dict[str, Any]:
        """The model's settings under their own names."""
        model = dataclasses.asdict(description.model)
        return {
            "architectures": ["DreamerForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_dreamer.DreamerConfig",
                "AutoModelForCausalLM": "modeling_dreamer.DreamerForCausalLM",
            },
            "model_type": self.model_type,
            "format_version": FORMAT_VERSION,
            "dtype": description.dtype,
            "keep_shared": description.keep_shared,
            **{name: value for name, value in model.items() if name not in NOT_DESCRIBED},
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos,
            "pad_token_id": tokenizer.pad,
            "max_position_embeddings": description.config.data.sequence_length,
            "tie_word_embeddings": False,
            "training_run": training_run(description),
        }

    def read(self, folder: Path, content: dict[str, Any]) -> Description:
        """Raises UserError also for a later version of this form."""
        path = folder / "config.json"
        version = content.get("format_version")
        if type(version) is not int or version < 1:
            raise UserError(f"{path}: format_version must be a number, not {version!r}")
        if version > FORMAT_VERSION:
            raise UserError(
                f"{path} has format {version}, which is newer than this version of dreamer-jax reads "
                f"({FORMAT_VERSION}); update dreamer-jax"
            )
        values, step, meta = read_training_run(path, content)
        for name in (field.name for field in dataclasses.fields(DreamerConfig)):
            if name in content and name not in NOT_DESCRIBED:
                values[f"model.{name}"] = content[name]
        dtype = content.get("dtype", content.get("torch_dtype"))
        dtype = "float32" if dtype == "float16" else dtype  # bfloat16 would round it
        if not isinstance(dtype, str) or dtype not in CODES:
            raise UserError(f"{path}: dtype must be bfloat16, float16 or float32, not {dtype!r}")
        found = {key: checked(path, key, value, DreamerConfig) for key, value in values.items()}
        loaded = build({key: Setting(value, str(path)) for key, value in found.items()})
        return Description(loaded.config, loaded.origins, dtype, bool(content.get("keep_shared")), step, meta)

    # Tensors

    def tensors(self, stored: StoredModel, description: Description) -> list[Tensor]:
        """Folded and cast piece by piece."""
        code = CODES[description.dtype]
        return [
            _tensor(stored, name, "F32" if name.float32 else code, description) for name in self._names(description)
        ]

    def shapes(self, description: Description) -> dict[str, tuple[int, ...]]:
        """Those of the leaves."""
        trees = abstract(description.model)
        found = {}
        for name in self._names(description):
            shape = at(trees[name.item], name.leaf).shape
            found[name.tensor] = tuple(shape if name.layer is None else shape[1:])
        return found

    def leaves(self, tensors: Mapping[str, Stored], description: Description) -> Iterator[Leaf]:
        """As they are."""
        for name in self._names(description):
            yield Leaf(name.item, name.leaf, name.layer, tensors[name.tensor].array())

    def parts(self, description: Description) -> dict[str, str]:
        """Embedding, SA, DA, EA, residual or head."""
        return {name.tensor: name.part for name in self._names(description)}

    def _names(self, description: Description) -> Iterator[Name]:
        return names_of(description.model, description.keep_shared)

    # Comparing and describing

    def affordable(self, model: DreamerConfig) -> int:
        """By what is read of expert matrices."""
        read = 4 * model.depth * model.hidden_size * (3 * model.expert_size * model.experts_per_token)
        return int(np.clip(READ_BYTES // (4 * read), 8, 64))

    def torch_side(self, folder: Path, tokens: np.ndarray, prompt: int, new: int, bfloat16: bool) -> TorchSide:
        """By the class of the folder that needs no transformers."""
        import torch

        from dreamer_jax.export.modeling_dreamer import Dreamer

        dreamer = Dreamer.load(folder).requires_grad_(False)
        rounded = _trace(dreamer, tokens).logits if bfloat16 else None
        dreamer.compute_dtype = torch.float32
        continued = dreamer.generate(torch.tensor(tokens[-1:, :prompt]), new).numpy()
        return TorchSide(_trace(dreamer, tokens), rounded, continued)

    def jax_side(self, stored: StoredModel, folder: Path, description: Description, dtype: str) -> Any:
        """See jax_side.py."""
        from dreamer_jax.export.jax_side import JaxSide

        return JaxSide(stored, folder, description, dtype)

    def about(self, description: Description, tokenizer: Tokenizer) -> About:
        """Variant, sizes, folding."""
        model = description.model
        if model.recurrent:
            depths = (
                f"It was trained at depth {model.depth}; pass `depth=N` to `generate` or `forward` for another one."
            )
        else:
            depths = f"It has {model.depth} layers; pass `depth=N` for fewer."
        return About(
            ("dreamer", "depth-recurrent", "mixture-of-experts"),
            f"{model.variant}, {model.depth} depths",
            f"""\
A causal language model of the Dreamer family (depth-recurrent attention mixtures), written by `dreamer export`.
Variant {model.variant}: {_KINDS[model.variant]}. Hidden size {model.hidden_size}, vocabulary {model.vocab_size},
{model.num_experts} experts{"" if model.recurrent else " a layer"} of {model.expert_size} with
{model.experts_per_token} active, mixing order `{model.mixing}`{_differences(model)}.

Matrices are {description.dtype}; norms, router keys and balancing biases are float32. Shared experts are
{_shared(description)}""",
            f"{_USE.replace('{bos}', str(tokenizer.bos))}\n{depths}",
            "\n\nCounted before folding; a forward pass is counted folded.",
        )


def _tensor(stored: StoredModel, name: Name, code: str, description: Description) -> Tensor:
    leaf = stored.leaf(name.item, name.leaf)
    shared = None
    if name.shared and description.model.shared_experts and not description.keep_shared:
        shared = stored.leaf(name.item, name.shared)
    shape = leaf.shape if name.layer is None else leaf.shape[1:]

    def read(start: int, stop: int) -> np.ndarray:
        rows = leaf[start:stop] if name.layer is None else leaf[name.layer, start:stop]
        return rows if shared is None else fold(rows, shared)

    return Tensor(name.tensor, code, shape, read)


def _trace(dreamer: Any, tokens: np.ndarray) -> Trace:
    """The PyTorch side: logits, and what every part put out, in the order of the forward pass."""
    import torch

    parts: list[tuple[str, np.ndarray]] = []

    def keep(name: str, module: Any):
        def hook(_, arguments, output):
            out = output[0] if isinstance(output, tuple) else output
            where = f"depth {arguments[1].depth}: " if len(arguments) > 1 else ""
            parts.append((where + name, out.float().numpy()))

        return module.register_forward_hook(hook)

    handles = [keep("embedding", dreamer.embedding)]
    for layer in dreamer.layers:
        named = {"DA": layer.depth_attention, "SA": layer.sequence_attention, "EA": layer.expert_attention}
        handles += [keep(name, module) for name, module in named.items() if module is not None]
        handles.append(keep("residual", layer))
    if dreamer.config.decoding_size:
        handles.append(keep("decoding layer", dreamer.decoding))
    try:
        with torch.no_grad():
            logits = dreamer(torch.tensor(tokens)).numpy()
    finally:
        for handle in handles:
            handle.remove()
    return Trace(parts, logits, np.ones(tokens.shape, bool))


def _differences(model: DreamerConfig) -> str:
    """What the settings leave out and add."""
    words = [*(f"no `{name}`" for name in model.left_out), *model.added]
    words += [model.depths_seen] if model.depths_seen else []
    return "".join(f", {each}" for each in words)


def _shared(description: Description) -> str:
    if not description.model.shared_experts:
        return "not part of this model."
    if description.keep_shared:
        return "kept apart, as in training."
    return (
        "folded into the routed ones (Eq. 8):\n"
        "right for generation; to train on exactly as before, export with `--keep-shared`."
    )
