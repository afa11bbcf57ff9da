"""Settings of the family `ponder`: a language model that reads its own predictions before it commits to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive


@dataclass(frozen=True)
class PonderConfig:
    """PonderLM: a stack of layers whose prediction is fed back to its input as a mean of embeddings.

    What is computed is what section 3.1.1 of the survey of latent reasoning (Zhu et al., 2025) says of Zeng et al.
    (2025), with the sizes of a small model by default."""

    family: Literal["ponder"] = "ponder"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 4
    """L: how often the stack is applied; it ponders one time less."""
    layers: int = 4
    """N: layers of the stack."""
    hidden_size: int = 128
    """h: size of the state."""
    vocab_size: int = 512
    """V: rows of the embedding and of the output head; at least the tokenizer's size."""
    heads: int = 4
    """Query heads of every layer."""
    kv_heads: int = 4
    """Key/value heads; divides heads."""
    head_size: int = 32
    """d of every head; even."""
    mlp_size: int = 384
    """F: intermediate size of the feed-forward networks."""
    rope_base: float = 10_000.0
    """RoPE base over the positions of the sequence."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every norm."""
    init_std: float = 0.02
    """Standard deviation of every matrix at the start."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attentions; auto takes the fastest of the platform."""

    @property
    def experts(self) -> int:
        """F: rows of the feed-forward matrices, which devices can divide among them like experts."""
        return self.mlp_size

    @property
    def summary(self) -> str:
        """One line on the model."""
        return (
            f"ponder, {self.layers} layers, depth {self.depth}, hidden size {self.hidden_size}, feed-forward "
            f"{self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model")
        require(
            self.heads % self.kv_heads == 0,
            "model.kv_heads",
            f"{self.kv_heads} does not divide model.heads {self.heads}",
        )
        require(
            self.head_size % 2 == 0,
            "model.head_size",
            f"{self.head_size} is odd; RoPE rotates pairs, so use an even number",
        )


CONFIG = PonderConfig
