"""Hugging Face's Qwen3-MoE with the sizes of an LA model and our recipe: what `dreamer bench train` compares with."""

from __future__ import annotations

import importlib.util
import inspect
import time
from typing import Any

import jax
import numpy as np

from dreamer_jax.config.sections import Config
from dreamer_jax.errors import UserError, how_to_install

EXPERTS = ("grouped_mm", "eager")
"""transformers' ways to compute the experts that are tried, `batched_mm` apart: it copies the weights of an expert
for every token that selected it, gigabytes a layer in training."""


def device() -> str:
    """Where both sides run, as torch calls it: "cpu", or "cuda" where jax has a GPU.

    Raises:
        UserError: jax has something else.
    """
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        raise UserError(f"--against transformers measures CPUs and GPUs, not {platform}; set JAX_PLATFORMS=cpu")
    return "cpu" if platform == "cpu" else "cuda"


def require_transformers() -> None:
    """Check that torch, on the device at hand, and a transformers that has `EXPERTS` can be imported.

    Raises:
        UserError: naming the extra to install.
    """
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--against transformers needs {' and '.join(missing)}; {how_to_install('bench')}")
    from transformers import __version__

    if int(__version__.partition(".")[0]) < 5:
        raise UserError(
            f"--against transformers needs transformers 5 or later, not {__version__}; " + how_to_install("bench")
        )
    import torch

    if device() == "cuda" and not torch.cuda.is_available():
        raise UserError("--against transformers: jax has a GPU, but this torch has none; install one built for CUDA")


def cache_name(model: Any) -> str:
    """The argument of a model's forward pass that takes its cache: transformers 5.24 gave it another name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def check_comparable(config: Config) -> None:
    """Check that Qwen3-MoE can have the configuration's sizes and does the same work in a step.

    Raises:
        UserError: it can't; the message says which setting is in the way.
    """
    variant = getattr(config.model, "variant", config.model.family)
    problems = {
        f"model.variant {variant}: Qwen3-MoE has distinct layers, as LA has": variant != "LA",
        f"model.dtype {config.model.dtype}: on a CPU both sides compute in float32": (
            config.model.dtype != "float32" and device() == "cpu"
        ),
        f"training.microbatches {config.training.microbatches}: use 1": config.training.microbatches != 1,
        f"{config.mesh.size} devices in the mesh: use 1": config.mesh.size != 1,
        f"recurrence.draw {config.recurrence.draw}: Qwen3-MoE goes through all its layers": (
            config.recurrence.draw != "model"
        ),
    }
    for problem, wrong in problems.items():
        if wrong:
            raise UserError(f"--against transformers can't be used with {problem}; try la_tiny")


def qwen(config: Config, experts: str) -> Any:
    """`Qwen3MoeForCausalLM` with the sizes and the dtype of an LA configuration, drawn from `run.seed`, on `device`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model: Any = config.model  # LA
    torch.manual_seed(config.run.seed)
    settings: dict[str, Any] = {  # untyped: some are known to a generation of transformers only
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.expert_size,  # of dense layers, which there are none of
        "moe_intermediate_size": model.expert_size,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.sa_heads,
        "num_key_value_heads": model.sa_kv_heads,
        "head_dim": model.sa_head_size,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "max_position_embeddings": config.data.sequence_length,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "output_router_logits": False,  # no auxiliary loss
        "use_cache": False,
        "attn_implementation": "sdpa",
        "experts_implementation": experts,
    }
    built: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    return built.to(device(), getattr(torch, model.dtype))


class QwenStep:
    """A train step of `Qwen3MoeForCausalLM`: AdamW, clipping and learning rate as in our recipe.

    In bfloat16 its weights and AdamW's moments are bfloat16 too, where ours are float32: less to read and to write.

    Args:
        config: an LA configuration.
        experts: one of `EXPERTS`.
    """

    def __init__(self, config: Config, experts: str):
        import torch

        self._recipe = config.training
        self._torch, self.experts = torch, experts
        self.model: Any = qwen(config, experts).train()
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        groups = [
            {"params": [w for w in self.model.parameters() if w.ndim > 1], "weight_decay": self._recipe.weight_decay},
            {"params": [w for w in self.model.parameters() if w.ndim == 1], "weight_decay": 0.0},
        ]
        betas = (self._recipe.beta1, self._recipe.beta2)
        self._optimizer = torch.optim.AdamW(groups, betas=betas, eps=self._recipe.epsilon, fused=True)
        self._steps = 0

    def __call__(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """One step on a batch, both [B, S] int32; returns the loss."""
        torch, recipe = self._torch, self._recipe
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, self._steps / max(1, recipe.warmup_steps))
        self._optimizer.zero_grad(set_to_none=True)
        logits = self.model(input_ids=torch.from_numpy(tokens).to(device()).long(), use_cache=False).logits
        wanted = torch.from_numpy(targets).to(device()).long().reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.reshape(wanted.numel(), -1), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm, foreach=True)
        self._optimizer.step()
        if device() == "cuda":
            torch.cuda.synchronize()
        return float(loss.detach())


def fastest_qwen3(config: Config, tokens: np.ndarray, targets: np.ndarray) -> tuple[QwenStep, dict[str, float]]:
    """The peer with the quickest of `EXPERTS`, and the shortest of three steps of each, in seconds."""
    seconds: dict[str, float] = {}
    best: QwenStep | None = None
    for experts in EXPERTS:
        step = QwenStep(config, experts)
        step(tokens, targets)  # the first one also allocates
        times = []
        for _ in range(3):
            began = time.perf_counter()
            step(tokens, targets)
            times.append(time.perf_counter() - began)
        seconds[experts] = min(times)
        if best is None or seconds[experts] < seconds[best.experts]:
            best = step
    assert best is not None
    return best, seconds
