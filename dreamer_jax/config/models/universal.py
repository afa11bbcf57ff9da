"""Settings of the family `universal`: the Universal Transformer, one layer that every position applies as often as it
needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dreamer_jax.config.values import Implementation, require, require_positive

Halting = Literal["graves", "interpolate", "none"]


@dataclass(frozen=True)
class UniversalConfig:
    """A Universal Transformer as a causal language model: one layer at every depth, and adaptive computation time.

    Dehghani et al. (2018); how a position halts is that of Graves (2016), or of tensor2tensor's code."""

    family: Literal["universal"] = "universal"
    """Which models: `dreamer info` lists the families, each with settings of its own."""
    depth: int = 8
    """T: most steps of a position; what training, evaluation and generation allow unless they are told otherwise."""
    hidden_size: int = 128
    """h: size of the state; even."""
    heads: int = 4
    """Attention heads; divides hidden_size."""
    mlp_size: int = 512
    """F: intermediate size of the transition, two matrices with ReLU between them."""
    vocab_size: int = 512
    """V: rows of the embedding, which is the output head too; at least the tokenizer's size."""
    halting: Halting = "graves"
    """graves: the output is a weighted sum of the states, weights add up to 1. interpolate: every step blends its state
    into the output, as tensor2tensor does. none: every position takes all steps, and its last state is the output."""
    halting_bias: float = 1.0
    """What the halting unit's bias starts at, and with it how deep training begins: with 1 (published) every position
    takes two steps, with -3 as many as 21."""
    halting_epsilon: float = 0.01
    """A position halts when its halting probabilities have added up to more than 1 - halting_epsilon."""
    ponder_weight: float = 0.01
    """Weight of the ponder cost in the loss, the number of steps and the remainder of a position, on average."""
    copy_halted: bool = True
    """Whether the state of a halted position stays as it is (published), so that generation can stop there. Without, it
    goes on changing and others see that, as in tensor2tensor; only the output stays."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, halting, the output's sum, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attention; auto takes the fastest of the platform."""

    @property
    def summary(self) -> str:
        """One line on the model."""
        return (
            f"universal, at most {self.depth} steps, halting {self.halting}, hidden size {self.hidden_size}, "
            f"feed-forward {self.mlp_size}, vocabulary {self.vocab_size}"
        )

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("ponder_weight",), signed=("halting_bias",))
        require(
            self.hidden_size % self.heads == 0,
            "model.heads",
            f"{self.heads} does not divide model.hidden_size {self.hidden_size}",
        )
        require(
            self.hidden_size % 2 == 0,
            "model.hidden_size",
            f"{self.hidden_size} is odd; positions and steps are pairs of a sine and a cosine, so use an even number",
        )
        require(
            1e-6 <= self.halting_epsilon < 1,
            "model.halting_epsilon",
            f"{self.halting_epsilon} is a share and must be below 1, and 1e-6 or more, as probabilities are float32",
        )


CONFIG = UniversalConfig
