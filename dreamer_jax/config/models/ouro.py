"""Settings of the family `ouro`: a looped language model that learns when to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive


@dataclass(frozen=True)
class OuroConfig:
    """A looped language model: a stack of layers applied R times, and a gate that says after which loop to stop.

    What is computed is sections 3 and 4.1 of Zhu et al. (2025), with the sizes of a small model by default."""

    family: Literal["ouro"] = "ouro"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 4
    """R: how often the stack is applied."""
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
    stage: Literal[1, 2] = 1
    """What the loss trains: 1 the model, with the gate's entropy; 2 the gate alone, by how much each loop improves the
    prediction (set training.trainable to exit_gate)."""
    entropy_weight: float = 0.1
    """Stage 1: weight of the entropy of the exit distribution."""
    improvement_slope: float = 50.0
    """Stage 2: how sharply an improvement of the loss becomes the wish to go on."""
    improvement_threshold: float = 0.005
    """Stage 2: the improvement, in nats, at which going on and stopping are wished for alike."""
    exit_threshold: float = 1.0
    """A generated token stops after the first loop by which the gate has stopped with this probability; 1: never
    early, 0: after the first."""
    cache: Literal["loops", "last"] = "loops"
    """Which keys of earlier tokens a generated token sees in a loop: those of the same loop, or always those of the
    last, which takes an R-th of the memory."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, softmax, norm statistics, gate and loss are always float32."""
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
            f"ouro, {self.layers} layers, {self.depth} loops, hidden size {self.hidden_size}, feed-forward "
            f"{self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("entropy_weight", "improvement_threshold", "exit_threshold"))
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
        require(
            self.stage == 1 or self.depth > 1,
            "model.stage",
            "2 teaches when another loop helps, and model.depth 1 has no other; use stage 1",
        )
        require(
            self.exit_threshold <= 1,
            "model.exit_threshold",
            f"{self.exit_threshold:g} is no probability; 1 never stops early, 0 stops after the first loop",
        )


CONFIG = OuroConfig
