"""Settings of the family `moeut`: a universal transformer whose layers are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive


@dataclass(frozen=True)
class MoeutConfig:
    """MoEUT: a group of layers that is repeated, with sigma-MoE feed-forward networks and SwitchHead attention.

    What is computed is the published code of Csordas et al. (2024), with the sizes of a small model by default."""

    family: Literal["moeut"] = "moeut"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 4
    """R: how often the group is applied; the model has layers * depth layers in all."""
    layers: int = 2
    """G: layers of the group, each with weights of its own."""
    hidden_size: int = 128
    """h: size of the state."""
    vocab_size: int = 512
    """V: rows of the embedding and of the output head; at least the tokenizer's size."""
    heads: int = 4
    """Attention heads."""
    head_size: int = 32
    """d of every head; divisible by 4, because one half of it is rotated."""
    attention_experts: int = 4
    """Experts of every head, for its values and for its outputs; 1: plain matrices, and a gate for every head."""
    attention_experts_per_token: int = 2
    """Experts of a head that a token selects; of no effect with one expert."""
    num_experts: int = 32
    """E: experts of every layer's feed-forward network."""
    experts_per_token: int = 4
    """k: those that a token selects."""
    expert_size: int = 64
    """F: intermediate size of an expert."""
    rope_base: float = 10_000.0
    """RoPE base over the positions of the sequence."""
    expert_entropy_weight: float = 0.01
    """Weight of the regulariser that keeps the experts of feed-forward networks in use."""
    attention_entropy_weight: float = 0.001
    """Weight of the regulariser that keeps the experts of the attention in use."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, selection of experts, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attentions and experts; auto takes the fastest of the platform."""

    @property
    def summary(self) -> str:
        """One line on the model."""
        return (
            f"moeut, {self.layers} layers, depth {self.depth}, hidden size {self.hidden_size}, {self.num_experts} "
            f"experts of {self.expert_size}, {self.experts_per_token} active, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("expert_entropy_weight", "attention_entropy_weight"))
        require(
            self.head_size % 4 == 0,
            "model.head_size",
            f"{self.head_size} is not divisible by 4; RoPE rotates pairs in the first half of each head",
        )
        require(
            self.experts_per_token <= self.num_experts,
            "model.experts_per_token",
            f"{self.experts_per_token} is more than model.num_experts {self.num_experts}",
        )
        require(
            self.attention_experts == 1 or self.attention_experts_per_token <= self.attention_experts,
            "model.attention_experts_per_token",
            f"{self.attention_experts_per_token} is more than model.attention_experts {self.attention_experts}",
        )


CONFIG = MoeutConfig
