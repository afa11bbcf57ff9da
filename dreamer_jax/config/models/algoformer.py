"""Settings of the family `algoformer`: three small transformers, of which the middle one is a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive


@dataclass(frozen=True)
class AlgoformerConfig:
    """AlgoFormer: a transformer that prepares, one that is applied T times, and one that reads the result off.

    Gao et al. (2024); without the first and the last, and with the input added in every loop, it is the looped
    transformer of Yang et al. (2023). Sizes of a small model by default."""

    family: Literal["algoformer"] = "algoformer"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 20
    """T: how often the loop is applied."""
    pre_layers: int = 1
    """Layers before the loop."""
    loop_layers: int = 1
    """Layers of the loop."""
    post_layers: int = 1
    """Layers behind the loop."""
    hidden_size: int = 256
    """h: size of the state."""
    vocab_size: int = 512
    """V: rows of the embedding, which is the output head too; at least the tokenizer's size."""
    heads: int = 8
    """Attention heads of every layer."""
    head_size: int = 32
    """d of every head; even."""
    mlp_size: int = 768
    """F: intermediate size of the feed-forward networks."""
    inject: Literal["none", "add"] = "none"
    """What a loop gets beside the state: nothing; or what the first transformer has made, added to the state, which
    then starts at zero."""
    scored: int = 15
    """dT: the loss is the mean of those after the last dT loops, each read off by the last transformer."""
    score: Literal["all", "sampled"] = "all"
    """How that mean is taken: all dT losses in every step; or one, of a loop drawn for each step."""
    truncate: bool = False
    """Differentiate the last dT loops of a step only; with `score: sampled` of those that it goes, so that its gradient
    isn't the mean of that of `all`. Without `inject: add` nothing before them is trained then."""
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
            f"algoformer, {self.pre_layers}+{self.loop_layers}x{self.depth}+{self.post_layers} layers, hidden size "
            f"{self.hidden_size}, feed-forward {self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("pre_layers", "post_layers"))
        require(
            self.head_size % 2 == 0,
            "model.head_size",
            f"{self.head_size} is odd; RoPE rotates pairs, so use an even number",
        )
        require(
            self.scored <= self.depth,
            "model.scored",
            f"{self.scored} losses, but model.depth is {self.depth}; use at most that",
        )


CONFIG = AlgoformerConfig
