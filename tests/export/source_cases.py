"""Pretrained stacks for the tests of conversions: a tiny Llama, and models of transformers itself."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.export.cases import WHY_SKIPPED

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SETTINGS = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 8,
    "vocab_size": 11,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
}


def llama_tensors(layers=6, equal=False):
    """Of the model in SETTINGS; all of its layers may be the same."""
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in (("embed_tokens", (11, 8)), ("norm", (8,))):
        tensors[f"model.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    sizes = {"self_attn.q": (8, 8), "self_attn.k": (4, 8), "self_attn.v": (4, 8), "self_attn.o": (8, 8)}
    sizes |= {"mlp.gate": (6, 8), "mlp.up": (6, 8), "mlp.down": (8, 6)}
    for i in range(layers):
        for name, shape in sizes.items():
            again = tensors.get(f"model.layers.0.{name}_proj.weight") if equal else None
            values = rng.normal(size=shape).astype(np.float32) if again is None else again
            tensors[f"model.layers.{i}.{name}_proj.weight"] = values
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(8, np.float32)
    return tensors | {"lm_head.weight": rng.normal(size=(11, 8)).astype(np.float32)}


ROTATIONS = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def transformers_model(kind):
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 259,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    sizes |= {"Qwen3": {"head_dim": 6, "tie_word_embeddings": True}}.get(kind, {})
    if kind == "Llama":  # with rotations as those of Llama 3.2: of two pairs one is slower, the other half-way
        sizes["rope_scaling" if int(transformers.__version__.split(".")[0]) < 5 else "rope_parameters"] = ROTATIONS
        sizes["rope_theta"] = ROTATIONS["rope_theta"]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return torch, model
